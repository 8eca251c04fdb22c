"""One rank of a test: runs the function that Cluster.start or torchrun names and stores what it returns.

With ``--serve`` a server of ranks: it has imported torch, and forks a process for every line it reads (rank_server.py).
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import pickle
import sys
import time
import warnings

_path = ""
_left: set[str] = set()  # modules, when the process ends


def report(**event: object) -> None:
    """One line for the test to read while the rank runs."""
    with open(f"{_path}.events", "a") as file:
        file.write(json.dumps({**event, "time": time.time()}) + "\n")


def _end(whole: bool) -> None:
    """A rank of the server ends as any interpreter does, and destroys what it has made itself and what shardd's libraries
    have, which are loaded later. What the server had imported is left alone: to clear torch's modules, and to run what its
    libraries have registered, takes five times as long as the rest. ``whole``: all does run, and the collector looks at torch's
    objects as well.
    """
    if whole:
        gc.unfreeze()
    else:
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # with the status
        _left.update(set(sys.modules) - {"__main__", "builtins", "sys"})


def _leave() -> None:
    """Behind all other functions at exit, which were registered later. In the place of modules that are left alone the
    interpreter finds what it puts there itself when it ends, and does not clear them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object([sys.modules.get(name) for name in _left]))
    sys.modules.update(dict.fromkeys(_left))  # type: ignore[arg-type]


def main() -> None:
    warnings.filterwarnings("ignore", message=".*returned a view.*")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with open(f"{_path}.args", "rb") as file:
        module, name, arguments = pickle.load(file)
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if os.environ.get("SHARDD_TEST_NO_GROUP") != "1":
        dist.init_process_group("gloo")
    result = function(*arguments)
    with open(f"{_path}.result", "wb") as file:
        pickle.dump(result, file)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["rank_main"] = sys.modules["__main__"]
    if sys.argv[1] == "--serve":
        atexit.register(_leave)
        from rank_server import serve

        _path = serve()  # returns in each rank
        _end(whole=os.environ.get("SHARDD_TEST_WHOLE_END") == "1")
    else:
        _path = sys.argv[1]
        if os.path.isdir(_path):  # from torchrun, which tells a rank by the environment alone
            _path = f"{_path}/{os.environ['RANK']}"
    main()
