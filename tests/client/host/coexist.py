"""A trainer in a process that also works with torch, with another gRPC and with another protobuf.

usage: coexist.py LIBSHARDD ADDRESS SPEC_FILE PROTO_FOLDER {others_first|shardd_first}
Prints what was loaded and done, and "ok" at the end. Exit code 77: something is not installed; "skip: ..." says what.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import time

library, address, spec_file, proto_folder, order = sys.argv[1:]
FLOATS = 33 * 17
LIMIT_S = 60
READY = 2  # GRPC_CHANNEL_READY


def skip(what):
    print("skip:", what)
    sys.exit(77)


class TimeSpec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_int64), ("tv_nsec", ctypes.c_int32), ("clock_type", ctypes.c_int)]


class Event(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("success", ctypes.c_int), ("tag", ctypes.c_void_p)]


class Others:
    """torch, Debian's gRPC and protobuf, whose symbols are global as in a program that is linked with them."""

    def __init__(self):
        try:
            import torch
        except ImportError as error:
            skip(f"torch ({error})")
        self.torch = torch
        try:
            for name in ("libprotobuf.so.32", "libgrpc++.so.1.51"):
                ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            self.core = ctypes.CDLL("libgrpc.so.29", mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            skip(f"Debian's gRPC and protobuf libraries ({error})")
        # Debian's Python packages, of which this interpreter knows nothing; behind its own.
        sys.path.append("/usr/lib/python3/dist-packages")
        os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "cpp"
        try:
            import grpc
            from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
            from google.protobuf.internal import api_implementation
        except ImportError as error:
            skip(f"python3-grpcio and python3-protobuf ({error})")
        if api_implementation.Type() != "cpp":
            skip(f"protobuf for Python in C++ (got {api_implementation.Type()})")
        self.grpc = grpc
        # Our own messages once more, in the other protobuf.
        with tempfile.NamedTemporaryFile() as out:
            subprocess.run(
                ["protoc", f"-I{proto_folder}", "--include_imports", f"-o{out.name}", "shardd/v1/jobs.proto"],
                check=True,
            )
            files = descriptor_pb2.FileDescriptorSet.FromString(out.read())
        pool = descriptor_pool.Default()
        for file in files.file:
            pool.Add(file)

        def find(name):
            return message_factory.MessageFactory(pool).GetPrototype(pool.FindMessageTypeByName(name))

        self.request = find("shardd.v1.ListJobsRequest")
        self.response = find("shardd.v1.ListJobsResponse")
        print("loaded torch", torch.__version__, "grpc", grpc.__version__, "protobuf", api_implementation.Type())

    def list_jobs(self):
        """Calls the daemon with the other gRPC; the answer is parsed by the other protobuf."""
        with self.grpc.insecure_channel(address) as channel:
            call = channel.unary_unary(
                "/shardd.v1.JobsService/ListJobs",
                request_serializer=self.request.SerializeToString,
                response_deserializer=self.response.FromString,
            )
            jobs = call(self.request(), timeout=LIMIT_S).jobs
        again = self.response.FromString(self.response(jobs=jobs).SerializeToString())
        assert list(again.jobs) == list(jobs), "a message changes when it is written and parsed"
        return {job.name: job.attached_ranks for job in jobs}

    def connect_core(self):
        """A channel of the shared libgrpc, connected."""
        core = self.core
        core.grpc_insecure_credentials_create.restype = ctypes.c_void_p
        core.grpc_channel_create.restype = ctypes.c_void_p
        core.grpc_channel_create.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
        core.grpc_channel_check_connectivity_state.argtypes = [ctypes.c_void_p, ctypes.c_int]
        core.grpc_channel_watch_connectivity_state.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            TimeSpec,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        core.grpc_channel_destroy.argtypes = [ctypes.c_void_p]
        core.grpc_completion_queue_create_for_next.restype = ctypes.c_void_p
        core.grpc_completion_queue_create_for_next.argtypes = [ctypes.c_void_p]
        core.grpc_completion_queue_next.restype = Event
        core.grpc_completion_queue_next.argtypes = [ctypes.c_void_p, TimeSpec, ctypes.c_void_p]
        core.grpc_init()
        queue = core.grpc_completion_queue_create_for_next(None)
        channel = core.grpc_channel_create(address.encode(), core.grpc_insecure_credentials_create(), None)
        end = TimeSpec(int(time.time()) + LIMIT_S, 0, 1)  # GPR_CLOCK_REALTIME
        state = core.grpc_channel_check_connectivity_state(channel, 1)
        while state != READY and time.time() < end.tv_sec:
            core.grpc_channel_watch_connectivity_state(channel, state, end, queue, None)
            core.grpc_completion_queue_next(queue, end, None)
            state = core.grpc_channel_check_connectivity_state(channel, 1)
        assert state == READY, f"the shared libgrpc does not connect (state {state})"
        core.grpc_channel_destroy(channel)


class AttachOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("spec_json", ctypes.c_char_p),
        ("rank", ctypes.c_int32),
        ("address", ctypes.c_char_p),
        ("replace", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int64),
        ("node", ctypes.c_int32),
        ("job_secret", ctypes.c_char_p),
        ("daemon_wait_ms", ctypes.c_int64),
    ]


class Trainer:
    def __init__(self):
        self.lib = ctypes.CDLL(library)
        self.lib.shardd_status_message.restype = ctypes.c_char_p
        self.lib.shardd_status_message.argtypes = [ctypes.c_void_p]
        for name in (
            "attach",
            "write_parameter",
            "commit_parameters",
            "unshard",
            "wait_unshard",
            "reshard",
            "detach",
            "parameter_data",
        ):
            getattr(self.lib, "shardd_" + name).restype = ctypes.c_void_p
        with open(spec_file, "rb") as file:
            spec = file.read()
        self.job = ctypes.c_void_p()
        options = AttachOptions(ctypes.sizeof(AttachOptions), spec, 0, address.encode(), 0, 1000 * LIMIT_S)
        self.check(self.lib.shardd_attach(ctypes.byref(options), ctypes.byref(self.job)))

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.shardd_status_message(status).decode())


if order == "others_first":
    others = Others()
    assert others.list_jobs() == {}
    others.connect_core()
    trainer = Trainer()
else:
    trainer = Trainer()
    others = Others()

torch, lib, job = others.torch, trainer.lib, trainer.job
param = lib.shardd_find_param(job, b"a.weight")
group = lib.shardd_find_group(job, b"a")
values = torch.arange(FLOATS, dtype=torch.float32)
trainer.check(
    lib.shardd_write_parameter(
        job, param, ctypes.c_void_p(values.data_ptr()), ctypes.c_int64(0), ctypes.c_int64(FLOATS)
    )
)
trainer.check(lib.shardd_commit_parameters(job))
trainer.check(lib.shardd_unshard(job, group, 1))
# Both at work in the midst of a pass.
jobs = others.list_jobs()
assert jobs == {"job": 1}, f"another gRPC sees other jobs: {jobs}"
others.connect_core()
trainer.check(lib.shardd_wait_unshard(job, group))
data = (ctypes.c_float * FLOATS).from_address(lib.shardd_parameter_data(job, param))
weight = torch.frombuffer(data, dtype=torch.float32).view(33, 17)
assert torch.equal(weight @ torch.eye(17), values.view(33, 17)), "torch reads other values"
trainer.check(lib.shardd_reshard(job, group))
trainer.check(lib.shardd_detach(job, 1))
assert others.list_jobs() == {}, "the job is still there"
print("ok")
