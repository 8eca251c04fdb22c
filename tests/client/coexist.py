"""A trainer in a process that already holds torch, another gRPC and another protobuf.

usage: coexist.py LIBSHARDD ADDRESS SPEC_FILE {torch_first|shardd_first}
Prints what was loaded and "ok" at the end. Exit code 77: torch is not installed.
"""

import ctypes
import sys

library, address, spec_file, order = sys.argv[1:]
FLOATS = 33 * 17


class AttachOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("spec_json", ctypes.c_char_p),
        ("rank", ctypes.c_int32),
        ("address", ctypes.c_char_p),
        ("replace", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int64),
    ]


def load_others():
    try:
        import torch
    except ImportError:
        sys.exit(77)
    print("torch", torch.__version__)
    for name in ("libprotobuf.so.32", "libgrpc.so.29", "libgrpc++.so.1.51"):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            print("loaded", name)
        except OSError:
            print("no", name)
    return torch


def load_shardd():
    shardd = ctypes.CDLL(library)
    shardd.shardd_status_message.restype = ctypes.c_char_p
    shardd.shardd_status_message.argtypes = [ctypes.c_void_p]
    for name in ("attach", "write_parameter", "commit_parameters", "unshard", "wait_unshard", "reshard", "detach"):
        getattr(shardd, "shardd_" + name).restype = ctypes.c_void_p
    shardd.shardd_parameter_data.restype = ctypes.c_void_p
    return shardd


if order == "torch_first":
    torch = load_others()
    shardd = load_shardd()
else:
    shardd = load_shardd()
    torch = load_others()


def check(status):
    if status:
        raise RuntimeError(shardd.shardd_status_message(status).decode())


with open(spec_file, "rb") as file:
    spec = file.read()
job = ctypes.c_void_p()
options = AttachOptions(ctypes.sizeof(AttachOptions), spec, 0, address.encode(), 0, 60000)
check(shardd.shardd_attach(ctypes.byref(options), ctypes.byref(job)))
param = shardd.shardd_find_param(job, b"a.weight")
group = shardd.shardd_find_group(job, b"a")
values = torch.arange(FLOATS, dtype=torch.float32)
check(shardd.shardd_write_parameter(job, param, ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(0),
                                    ctypes.c_int64(FLOATS)))
check(shardd.shardd_commit_parameters(job))
check(shardd.shardd_unshard(job, group, 1))
check(shardd.shardd_wait_unshard(job, group))
data = (ctypes.c_float * FLOATS).from_address(shardd.shardd_parameter_data(job, param))
weight = torch.frombuffer(data, dtype=torch.float32).view(33, 17)
assert torch.equal(weight @ torch.eye(17), values.view(33, 17)), "torch reads other values"
check(shardd.shardd_reshard(job, group))
check(shardd.shardd_detach(job, 1))
print("ok")
