"""What ranks do in the tests of crash and resume. Each function runs on every rank, in every attempt."""

from __future__ import annotations

import json
import logging
import os
import pty
import select
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from models import Case, build, loss_of, make_optimizer, shard
from rank_main import report

# (rank, step, moment), one for each attempt of the launcher.
Kills = tuple[tuple[int, int, str], ...]


def attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Killer:
    """Kills this process at the moment that the attempt's entry names."""

    def __init__(self, kills: Kills) -> None:
        rank = dist.get_rank()
        self.mine = kills[attempt()] if attempt() < len(kills) else (-1, -1, "")
        self.armed = self.mine[0] == rank

    def at(self, moment: str, step: int = -1) -> None:
        if self.armed and self.mine[1:] == (step, moment):
            report(event="killed", step=step, moment=moment)
            _die()

    def inside(self, moment: str, step: int) -> None:
        """The caller is about to wait for the other rank, which is late at ``step``: dies in that wait."""
        if self.mine[1:] != (step, moment):
            return
        if self.armed:
            report(event="killed", step=step, moment=moment)
            threading.Timer(0.2, _die).start()
        else:
            time.sleep(1)


class _DieInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, killer: _Killer, step: int) -> torch.Tensor:
        ctx.killer, ctx.step = killer, step
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.killer.at("backward", ctx.step)
        return gradient, None, None


def train(steps: int, kind: str, kills: Kills) -> dict[str, Any]:
    """A trainer that knows nothing of crashes but ``resume`` and ``ride``."""
    from shardd.torch import counters, fully_shard, resume, ride
    from shardd.torch.optim import SGD, AdamW

    rank = dist.get_rank()
    killer = _Killer(kills)
    model = build(Case())
    shard(model, Case(), fully_shard)
    others: list[torch.optim.Optimizer] = []
    if kind == "several":
        params = list(model.parameters())
        optimizer = AdamW(params[:5], lr=1e-2, amsgrad=True)
        others = [SGD(params[5:9], lr=0.1, momentum=0.9), AdamW(params[9:], lr=1e-3)]
    elif kind == "daemon":
        optimizer = make_optimizer(model, Case(optimizer="groups"), AdamW, SGD)
    elif kind == "stock-sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    killer.inside("register", -1)
    start, state = resume(model)
    losses: list[float] = []
    if state is not None:
        losses = state["losses"]
        torch.set_rng_state(state["rng"])
        # It rode as it was at the step; what the dead trainer would have done after the step is done here.
        scheduler.load_state_dict(state["scheduler"])
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr()):
            group["lr"] = lr
        scheduler.step()
    else:
        torch.manual_seed(100 + rank)
    report(event="start", step=start, known=len(losses), attempt=attempt())
    for step in range(start, steps):
        handles = [
            model.layers[1].register_forward_pre_hook(lambda *_, s=step: killer.at("forward", s)),
            model.layers[1].down.register_forward_pre_hook(
                lambda m, args, s=step: (_DieInBackward.apply(args[0], killer, s),)
            ),
        ]
        noise = torch.randn(()) * 1e-3  # of the random state that rides
        loss = loss_of(model, step, 0, rank) * (1 + noise)
        killer.inside("waiting", step)
        loss.backward()
        for handle in handles:
            handle.remove()
        losses = [*losses, loss.item()]
        ride(
            {
                "losses": losses,
                "scheduler": scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            }
        )
        killer.at("before", step)
        killer.inside("step", step)
        optimizer.step()
        for other in others:
            killer.at("between", step)
            other.step()
        report(event="step", step=step + 1, attempt=attempt())
        killer.at("after", step)
        scheduler.step()
        model.zero_grad()
    counts = counters(model)
    return {
        "losses": losses,
        "counters": counts,
        "lr": scheduler.get_last_lr(),
        "parameters": {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()},
    }


def survive(steps: int, folder: str, collectives: bool) -> dict[str, Any]:
    """Rank 1 dies in its first life as it begins step 3; rank 0 goes on in its own process, with ``shardd.torch.steps``."""
    import shardd.torch
    from shardd.torch import counters, fully_shard, ride
    from shardd.torch.optim import AdamW

    rank = int(os.environ["RANK"])
    generation = attempt()

    def make_group() -> None:
        if collectives:
            store = dist.FileStore(f"{folder}/store-{generation}", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        else:
            dist.init_process_group("fake", rank=rank, world_size=2)

    def rebuild() -> None:
        nonlocal generation
        generation += 1
        dist.destroy_process_group()
        make_group()

    make_group()
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    resumed = []
    for step in shardd.torch.steps(steps, rebuild=rebuild if collectives else None):
        with step:
            if step.resumed:
                resumed.append(int(step))
                losses = step.state or []
            report(event="begins", step=step, pid=os.getpid())
            if rank == 1 and step == 3 and attempt() == 0:
                _die()
            loss = loss_of(model, step, 0, rank)
            loss.backward()
            if collectives:
                total = loss.detach().clone()
                dist.all_reduce(total)
                report(event="total", step=step, total=total.item())
            ride([*losses, loss.item()])
            optimizer.step()
            optimizer.zero_grad()
            losses = [*losses, loss.item()]
    return {"losses": losses, "resumed": resumed, "counters": counters(model)}


def survive_agreements(steps: int, folder: str) -> dict[str, Any]:
    """Saves, in three agreements, after every step. Rank 1 has three lives: it dies between two agreements of step 3's save,
    comes again and finishes before the last step, and comes once more. Rank 0, and the store, go on throughout."""
    import shardd.torch
    from shardd.torch import counters, fully_shard, load_safetensors, save_safetensors
    from shardd.torch._ranks.agreement import Meeting
    from shardd.torch.optim import AdamW

    rank, now = int(os.environ["RANK"]), -1
    dist.init_process_group("fake", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    original = Meeting.agree

    def agree(self: Meeting, what: str, *args: Any, part: str = "", **kwargs: Any) -> None:
        original(self, what, *args, part=part, **kwargs)
        if rank == 1 and attempt() == 0 and now == 3 and part == "save: plan":
            _die()

    Meeting.agree = agree  # type: ignore[method-assign]
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses: dict[int, float] = {}

    def train(step: int) -> None:
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()

    begins = []
    for step in shardd.torch.steps(steps - 1):
        with step:
            now = int(step)
            if step.resumed:
                begins.append(now)
            train(now)
            save_safetensors(model, f"{folder}/checkpoint")
    if rank == 1 and attempt() == 1:
        shardd.torch.finish(model)
        return {"losses": losses, "begins": begins}
    assert shardd.torch.resume(model)[0] == steps - 1
    load_safetensors(model, f"{folder}/checkpoint")
    train(steps - 1)
    return {"losses": losses, "begins": begins, "counters": counters(model)}


def error_in_a_step() -> str:
    """What is no abort goes through ``with step``."""
    import shardd.torch
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    try:
        for step in shardd.torch.steps(2, model, rebuild=lambda: None):
            with step:
                loss_of(model, step, 0, dist.get_rank()).backward()
                optimizer.step()
                if step == 1:
                    raise RuntimeError("mine")
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


def values_win() -> dict[str, Any]:
    """First attempt: two steps, then the process fails. Second: the program gives other values, then loads others."""
    from shardd.torch import counters, fully_shard, resume
    from shardd.torch.optim import AdamW

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("shardd.torch").addHandler(Lines())
    rank = dist.get_rank()
    model = build(Case())
    if attempt() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    step, _ = resume(model)
    value = model.head.weight.full_tensor().detach().clone()
    if attempt() == 0:
        for number in range(2):
            loss_of(model, number, 0, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        value = model.head.weight.full_tensor().detach().clone()
        report(event="first", value=value.sum().item())
        dist.barrier()
        sys.exit(3)
    loaded = {n: torch.full_like(v, 0.5) if v.is_floating_point() else v for n, v in model.state_dict().items()}
    model.load_state_dict(loaded)
    after = model.head.weight.full_tensor().detach().clone()
    loss_of(model, 2, 0, rank).backward()
    return {
        "step": step,
        "value": value.sum().item(),
        "loaded": after.unique().tolist(),
        "lines": lines,
        "counters": counters(model),
    }


def progress_on_a_terminal(terminal: bool) -> str:
    """What rank 0 writes to standard error while it waits 3 s for rank 1 to register."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    if dist.get_rank() == 0:
        sys.stderr = os.fdopen(writer, "w")
    else:
        time.sleep(3)
    from shardd.torch import fully_shard

    model = build(Case())
    shard(model, Case(), fully_shard)
    loss_of(model, 0, 0, 0)
    sys.stderr.flush()
    text = b""  # a terminal passes on what was written a moment later
    while dist.get_rank() == 0 and select.select([reader], [], [], 0.5)[0]:
        text += os.read(reader, 100_000)
    return text.decode()


def stays_away() -> None:
    """Rank 1 never uses its model: rank 0 has named no job, or waits for nobody to name it."""
    from shardd.torch import fully_shard

    model = build(Case())
    shard(model, Case(), fully_shard)
    if dist.get_rank() == 1:
        try:  # which begins before the test is told to interrupt it
            report(event="waiting")
            loss_of(model, 0, 0, 1)
        except KeyboardInterrupt:
            report(event="interrupted")
            os._exit(0)
    signal.sigwait({signal.SIGUSR1})
    os._exit(0)


def too_late(start_over: bool) -> dict[str, Any]:
    """Three steps, and all ranks fail. Whoever is restarted comes when the daemon has freed the job."""
    from shardd.torch import fully_shard, resume
    from shardd.torch._process.extension import _C
    from shardd.torch.optim import AdamW

    deadline = time.monotonic() + 20
    while attempt() == 1 and json.loads(_C.describe_daemon(10_000)).get("jobs", 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    dist.barrier()  # before one of them opens it anew
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    try:
        begins = resume(model, start_over=start_over)[0]
    except RuntimeError as error:
        return {"error": str(error)}
    for step in range(begins, 3):
        loss_of(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if attempt() == 0:
        dist.barrier()
        sys.exit(3)
    return {"begins": begins}


def survive_registration(folder: str) -> list[float]:
    """Rank 1 dies in its first life with its session made and its values not given; rank 0 goes on in its own process."""
    import shardd.torch
    from shardd.torch import fully_shard
    from shardd.torch._job import opening
    from shardd.torch.optim import AdamW

    dist.init_process_group("fake", rank=int(os.environ["RANK"]), world_size=2)
    rank = dist.get_rank()
    if rank == 1 and attempt() == 0:
        opening.write_values = lambda *_: _die()  # type: ignore[assignment]
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in shardd.torch.steps(3):
        with step:
            loss = loss_of(model, step, 0, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
