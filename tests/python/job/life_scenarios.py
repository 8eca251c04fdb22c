"""What ranks do in the tests of life in a real trainer. Each function runs on every rank."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import rank_main
from models import Case, Model, batch, build, loss_of, shard, train_steps
from rank_main import report

_LIMIT_S = 60


def trainer(stock: bool = False, case: Case | None = None) -> tuple[Model, Any]:
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model = build(case or Case())
    shard(model, case or Case(), fully_shard)
    return model, (torch.optim.AdamW if stock else AdamW)(model.parameters(), lr=1e-2)


def counters_of(model: nn.Module) -> dict[str, int]:
    from shardd.torch import counters

    return counters(model)


# DataLoader workers.


class Rows(torch.utils.data.Dataset[Any]):
    """Batches; the row after the last is one that takes for ever, so that its worker is busy with it."""

    def __init__(self, rank: int, rows: int, endless: bool) -> None:
        self.rank, self.rows, self.endless = rank, rows, endless
        self.path = rank_main._path

    def __len__(self) -> int:
        return self.rows + self.endless

    def __getitem__(self, index: int) -> Any:
        if index == self.rows:
            rank_main._path = self.path  # a spawned worker has a module of its own
            report(event="busy", pid=os.getpid())
            time.sleep(_LIMIT_S)
        tokens, targets = batch(index, 0, self.rank)
        return tokens.clone(), targets.clone()


def dies_among_workers(steps: int, method: str) -> dict[str, Any]:
    """In the first attempt rank 1 is killed while a DataLoader worker of each rank is busy."""
    from shardd.torch import resume

    model, optimizer = trainer()
    rank = dist.get_rank()
    start, _ = resume(model)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    report(event="start", step=start, first=first)
    rows = torch.utils.data.DataLoader(
        Rows(rank, steps, first), batch_size=None, num_workers=1, multiprocessing_context=method, prefetch_factor=steps + 1
    )  # fmt: skip
    losses = []
    for step, (tokens, targets) in enumerate(rows):
        if step < start:
            continue
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if first and step == steps // 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"losses": losses, "counters": counters_of(model)}


# Waits.


def _waits(model: Any, optimizer: Any) -> dict[str, Any]:
    """Calls in which a rank waits for the others."""
    rank = dist.get_rank()
    state = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}

    def step() -> None:
        optimizer.step()
        if isinstance(optimizer, torch.optim.AdamW):
            loss_of(model, 1, 0, rank)  # enters the next pass with the others

    return {
        "register": lambda: loss_of(model, 0, 0, rank),
        "backward": lambda: loss_of(model, 0, 0, rank).backward(),
        "step": step,
        "load": lambda: model.load_state_dict(state),
    }


def interrupted_in(wait: str, stock: bool) -> str:
    """Rank 0 waits for rank 1, which sleeps; the test sends rank 0 a SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    model, optimizer = trainer(stock)
    waits = _waits(model, optimizer)
    if wait == "step":
        loss_of(model, 0, 0, dist.get_rank()).backward()
    elif wait != "register":
        train_steps(model, optimizer, range(1))
    if dist.get_rank() == 1:
        report(event="sleeping")
        signal.sigwait({signal.SIGUSR1})
        os._exit(0)
    try:  # which begins before the test is told to interrupt it
        report(event="waiting")
        waits[wait]()
    except KeyboardInterrupt:
        report(event="interrupted")
        os._exit(0)
    return "not interrupted"


def others_run_while_waiting(folder: str, stock: bool) -> dict[str, Any]:
    """Rank 1 comes to each wait only when a Python thread of rank 0 has been seen to run in it."""
    model, optimizer = trainer(stock)
    rank = dist.get_rank()
    seen = []
    for name, wait in _waits(model, optimizer).items():
        if name == "load" and (stock or os.environ.get("SHARDD_IN_PLACE_EDITS") != "0"):
            continue  # a load between passes waits for nobody
        path = f"{folder}/{name}"
        if rank == 1:
            deadline = time.monotonic() + _LIMIT_S
            while not os.path.exists(path):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no thread of rank 0 ran in {name}")
                time.sleep(0.01)
            wait()
            continue
        entered = threading.Event()

        def count(path: str = path, entered: threading.Event = entered) -> None:
            entered.wait()
            turns = 0
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:  # bytecode, which needs the lock
                turns += 1
            open(path, "w").close()

        thread = threading.Thread(target=count)
        thread.start()
        entered.set()
        wait()
        seen.append((name, os.path.exists(path)))
        thread.join()
    return {"seen": seen, "counters": counters_of(model)}


# Threads.


def train_in_threads() -> dict[str, Any]:
    """A model trained in a thread and then in the main one; two models at once, started in another order by each rank."""
    model, optimizer = trainer()
    losses: list[float] = []
    thread = threading.Thread(target=lambda: losses.extend(train_steps(model, optimizer, range(3))))
    thread.start()
    thread.join()
    losses.extend(train_steps(model, optimizer, range(3, 6)))
    pairs = [trainer(), trainer()]
    at_once: list[list[float]] = [[], []]
    threads = [
        threading.Thread(target=lambda i=i: at_once[i].extend(train_steps(*pairs[i], range(6)))) for i in range(2)
    ]
    for thread in threads if dist.get_rank() == 0 else reversed(threads):
        thread.start()
        time.sleep(0.2)  # the other order, not only most of the time
    for thread in threads:
        thread.join()
    return {
        "losses": losses,
        "at_once": at_once,
        "counters": [counters_of(m) for m in (model, pairs[0][0], pairs[1][0])],
    }


# Logging.


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name} {record.levelname} {record.getMessage()}")


class _View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).view(-1)


def logs_and_warnings() -> dict[str, Any]:
    from shardd.torch import fully_shard

    handler = _Lines()
    logging.getLogger("shardd").addHandler(handler)
    logging.getLogger("shardd").setLevel(logging.INFO)
    model, optimizer = trainer()
    train_steps(model, optimizer, range(1))
    model.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(_View())(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            fully_shard(_View())(torch.ones(2, 4))
            raised = ""
        except UserWarning as warning:
            raised = str(warning)
    return {"lines": handler.lines, "warnings": [str(w.message) for w in caught], "raised": raised}


def raises_and_lives_on(folder: str) -> str:
    """Rank 1's main thread raises behind its first step, and another thread keeps its process. What rank 0 is told."""
    from shardd.errors import StepAborted
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    rank = dist.get_rank()
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        if rank == 1 and step == 1:
            threading.Thread(target=_wait_for, args=(f"{folder}/told",)).start()
            raise RuntimeError("the program's own")
        try:
            loss_of(model, step, 0, rank).backward()
            optimizer.step()
        except StepAborted as error:
            Path(f"{folder}/told").touch()
            os._exit(0 if "rank detached" in str(error) else 3)
        optimizer.zero_grad()
    return ""


def _wait_for(path: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
