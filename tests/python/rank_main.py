"""One rank of a test: runs the function that Cluster.start or torchrun names and stores what it returns.

With ``--serve`` a server of ranks: it has imported torch, and forks a process for every line it reads (rank_server.py).
"""

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


def report(**event: object) -> None:
    """One line for the test to read while the rank runs."""
    with open(f"{_path}.events", "a") as file:
        file.write(json.dumps({**event, "time": time.time()}) + "\n")


def _end(whole: bool) -> None:
    """A rank of the server ends as any interpreter does, and destroys what shardd's libraries have, which are loaded later; but
    what torch's have registered to run at exit does not run, which takes twice the time of the rest. ``whole``: all does, and
    the collector looks at torch's objects as well.
    """
    if whole:
        gc.unfreeze()
    else:
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # with the status


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
        from rank_server import serve

        _path = serve()  # returns in each rank
        _end(whole=os.environ.get("SHARDD_TEST_WHOLE_END") == "1")
    else:
        _path = sys.argv[1]
        if os.path.isdir(_path):  # from torchrun, which tells a rank by the environment alone
            _path = f"{_path}/{os.environ['RANK']}"
    main()
