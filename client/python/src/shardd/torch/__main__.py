"""``python -m shardd.torch script.py ...``: a program on shardd without a changed line, under any launcher:

torchrun --nproc-per-node=2 -m shardd.torch script.py --its-own arguments
accelerate launch -m shardd.torch script.py
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import json
import os
import runpy
import sys
import types

import torch.distributed as dist

import shardd.torch
from shardd.torch._install import install
from shardd.torch._job import process_end
from shardd.torch._job.job import TorchJob, before_end, registered
from shardd.torch._process import environment
from shardd.torch._units import state


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m shardd.torch",
        description="Runs a program with PyTorch's fully sharded data parallel replaced by shardd's.",
    )
    parser.add_argument("--stock-optimizers", action="store_true", help="torch.optim's optimizers step in the trainers")
    parser.add_argument(
        "--counts", metavar="FILE", help="append what the daemon did, a line of JSON for each model's job"
    )
    parser.add_argument("--list", action="store_true", help="print what is replaced, and end")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs="?", help="a script, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    arguments = parser.parse_args(argv)
    if arguments.program is None and not arguments.list:
        parser.error("no program given")
    return arguments


def _count_into(path: str) -> None:
    """The job's first rank writes its line where the job is given up: with its model, or at exit."""

    def count(job: TorchJob) -> None:
        assert job.engine is not None
        if job.ranks.rank != 0:
            return
        with contextlib.suppress(RuntimeError):  # the daemon is gone
            counts = json.loads(job.engine.describe())["counters"]
            with open(path, "a") as file:
                file.write(json.dumps({"job": job.name, **{name: int(value) for name, value in counts.items()}}) + "\n")

    before_end.append(count)


def _run_script(path: str) -> None:
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
    except OSError as error:
        sys.exit(f"python -m shardd.torch: read script {path!r}: {error.strerror}")
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    # It stays the main module until the process has ended, so that spawned processes and atexit find it as they would.
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _say_what_was_not_sharded() -> None:
    """At the end of a program that has done well without shardd: it was started here to be sharded."""
    if process_end.failed() or registered() or install.starts_others():
        return
    made = state.made()
    if made:
        why = f"{made} modules were given to it and none was used in a forward"
    else:
        why = "no module was given to fully_shard or FullyShardedDataParallel"
        if not dist.is_initialized():
            ranks = environment.count(environment.WORLD_SIZE)
            alone = f", so this is one of {ranks} that ran without each other" if ranks > 1 else ""
            why += (
                f", and this process has no process group at its end{alone}; a launcher's configuration has to ask for "
                "FSDP (accelerate: distributed_type: FSDP), or the program calls init_process_group and shards its model"
            )
    print(f"python -m shardd.torch: nothing was sharded: {why}", file=sys.stderr, flush=True)


def main() -> None:
    arguments = _arguments(sys.argv[1:])
    names = shardd.torch.install(optimizers=not arguments.stock_optimizers)
    if arguments.list:
        print("\n".join(names))
        return
    if arguments.counts:
        _count_into(os.path.abspath(arguments.counts))
    atexit.register(_say_what_was_not_sharded)
    sys.argv = [arguments.program, *arguments.arguments]
    if arguments.module:
        runpy.run_module(arguments.program, run_name="__main__", alter_sys=True)
    else:
        _run_script(arguments.program)


if __name__ == "__main__":
    main()
