"""Both runs of a program and their comparison, in one process that has imported the libraries once and forks the ranks.

forked.py NAME FOLDER PROGRAM ARGUMENTS...: what run.sh does with torchrun, in a third of the time, of which imports are most.
A rank has torchrun's environment. With shardd the libraries have been imported before `-m shardd.torch` begins, where under
torchrun it comes first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import compare

RANKS = 2
LIMIT_S = 300
# What transformers imports where it is first used.
LATE = ("transformers.models.llama.modeling_llama", "transformers.trainer")


def import_libraries(program: Path) -> None:
    """Imports what ``program`` imports. Raises where that has started a thread, which ranks would lack."""
    importlib.import_module(program.stem)
    del sys.modules[program.stem]  # ranks run it as their main module
    if "transformers" in sys.modules:
        for name in LATE:
            importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"fork ranks of {program.name}: imports have started threads (got {threads}, want 1)")
    gc.collect()
    gc.freeze()  # else each rank copies all of these pages when it ends


def become_rank(rank: int, port: int, run: str, log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), ROLE_RANK=str(rank), GROUP_RANK="0", ROLE_NAME="default",
        WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS), ROLE_WORLD_SIZE=str(RANKS), GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=run, TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_USE_AGENT_STORE="False",
    )  # fmt: skip


def execute(command: list[str]) -> None:
    """As ``python COMMAND...``, in this process."""
    module = command[0] == "-m"
    sys.argv = command[1:] if module else command
    if module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")


def fork_ranks(command: list[str], folder: Path) -> None:
    """Runs ``command`` on all ranks, with ``folder`` empty at the start. Raises ``compare.Differs`` where one fails or all take too long."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    sys.stdout.flush()
    ranks: set[int] = set()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, port, f"forked-{os.getppid()}-{folder.name}", log)
            execute([*command, "--out", str(folder)])
            sys.exit()
        ranks.add(pid)
    failed, deadline = "", time.monotonic() + LIMIT_S
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        ranks.discard(pid)
        if pid and status and not failed:
            failed = f"a rank ended with status {os.waitstatus_to_exitcode(status)}"
        if not failed and time.monotonic() > deadline:
            failed = f"not done after {LIMIT_S} s"
        if failed:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
        if not pid:
            time.sleep(0.02)
    if failed:
        lines = log.read_text(errors="replace").splitlines()
        raise compare.Differs(f"{folder.name}: {failed}\n" + "\n".join(lines[-40:]))


def main() -> None:
    name, work, program = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    counts = work / f"{name}.counts"
    counts.unlink(missing_ok=True)
    import_libraries(Path(program[0]))
    try:
        fork_ranks(program, work / f"{name}.pytorch")
        fork_ranks(["-m", "shardd.torch", "--counts", str(counts), *program], work / f"{name}.shardd")
    except compare.Differs as differs:
        sys.exit(f"{name}: {differs}")
    compare.report(name, work / f"{name}.pytorch", work / f"{name}.shardd", counts)


if __name__ == "__main__":
    main()
