"""What ranks do in the tests of torch's own optimizers: their state lies in the job's memory, and outlives the trainer."""

from __future__ import annotations

import copy
import importlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from models import loss_of, train_steps
from optimizers.optim_cases import counts, full_state, model_of, parameters_of
from rank_main import report

KINDS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-3),
}


def in_the_jobs_memory(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            if begin <= address < end:
                return "shardd-optimizer" in line
    return False


def train(impl: str, kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = KINDS[kind](list(model.parameters()))
    losses = []
    for step in range(6):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # other tensors, not those of the job
    homes = []
    for param, state in optimizer.state.items():
        for value in state.values():
            rows = value.to_local() if hasattr(value, "to_local") else value
            if torch.is_tensor(rows) and rows.numel() and rows.shape == param.to_local().shape:
                homes.append(in_the_jobs_memory(rows))
    result = {"losses": losses, "state": full_state(optimizer), "parameters": parameters_of(model), "homes": homes}
    if impl == "shardd":
        from shardd.torch import commit

        commit(model)
        result["counters"] = counts(impl, model)
    return result


def both(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return train("torch", kind), train("shardd", kind)


def states_beside(impl: str) -> dict[str, Any]:
    """Two optimizers take turns over the same parameters, and one goes on from state that it had before a load."""
    model = model_of(impl)
    params = list(model.parameters())
    adamw = torch.optim.AdamW(params, lr=1e-2, eps=1e-3)
    adam = torch.optim.Adam(params, lr=1e-2, betas=(0.5, 0.6), eps=1e-3)
    early = copy.deepcopy(adamw.state_dict())
    losses: list[float] = []
    for step in range(6):
        losses += train_steps(model, adamw if step % 3 else adam, range(step, step + 1))
        if step == 1:
            early = copy.deepcopy(adamw.state_dict())
    late = adamw.state_dict()
    adamw.load_state_dict(early)
    losses += train_steps(model, adamw, range(6, 7))
    adamw.load_state_dict(late)
    losses += train_steps(model, adamw, range(7, 8))
    return {"losses": losses, "states": [full_state(adamw), full_state(adam)], "parameters": parameters_of(model)}


def both_beside() -> tuple[dict[str, Any], dict[str, Any]]:
    return states_beside("torch"), states_beside("shardd")


def train_and_be_killed(kind: str, steps: int) -> dict[str, Any]:
    """Goes on where the job is; says where it stands in each step, so that the test can kill it there."""
    from shardd.torch import commit, resume, ride

    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = KINDS[kind](list(model.parameters()))
    start, state = resume(model)
    losses: list[float] = state or []
    report(event="start", step=start, known=len(losses), states=len(optimizer.state))
    for step in range(start, steps):
        loss = loss_of(model, step, 0, rank)
        report(event="forward", step=step)
        if os.environ.get("HOLD") == f"forward {step}" and rank == 1:
            time.sleep(600)  # until the test kills it
        loss.backward()
        losses = [*losses, loss.item()]
        ride(losses)
        optimizer.step()
        optimizer.zero_grad()
        report(event="stepped", step=step)
        if os.environ.get("HOLD") == f"stepped {step}" and rank == 1:
            time.sleep(600)
    commit(model)
    return {"losses": losses, "state": full_state(optimizer), "parameters": parameters_of(model),
            "counters": counts("shardd", model)}  # fmt: skip


def _hold_in_the_middle_of_steps(reached: Any) -> None:
    """Each step of torch's AdamW updates half of the parameters, calls ``reached``, and updates the others."""
    module = importlib.import_module("torch.optim.adam")
    whole = module.adam

    def torn(params: list[Any], *lists: Any, **more: Any) -> None:
        for number, cut in enumerate((slice(0, len(params) // 2), slice(len(params) // 2, None))):
            if number == 1:
                reached()
            whole(params[cut], *(each[cut] if isinstance(each, list) else each for each in lists), **more)

    module.adam = torn


def train_large_and_be_torn(steps: int, pause_s: float = 600) -> dict[str, Any]:
    """As ``train_and_be_killed``, in the middle of the step HOLD, of a model whose snapshot takes as long as its steps."""
    import shardd.torch
    from shardd.torch import commit, fully_shard, ride

    rank = dist.get_rank()
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    # Each snapshot has it, so that snapshots would be rare if ranks waited for them.
    model.table = torch.nn.Parameter(torch.zeros(32 << 20), requires_grad=False)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    at = {"step": -1}

    def reached() -> None:
        if rank == 1 and os.environ.get("HOLD") == str(at["step"]):
            os.environ["HOLD"] = ""
            report(event="torn", step=at["step"])
            time.sleep(pause_s)

    _hold_in_the_middle_of_steps(reached)
    losses: list[float] = []
    starts = []
    for step in shardd.torch.steps(steps):
        with step:
            if step.resumed:
                losses = step.state or []
                starts.append(int(step))
                report(event="start", step=int(step))
            at["step"] = int(step)
            loss = (
                model(torch.randn(2, 1024, generator=torch.Generator().manual_seed(2 * int(step) + rank)))
                .square()
                .mean()
            )
            loss.backward()
            ride([*losses, loss.item()])
            optimizer.step()
            optimizer.zero_grad()
            losses = [*losses, loss.item()]
    commit(model)
    parameters = parameters_of(model)
    del parameters["table"]
    return {"losses": losses, "state": full_state(optimizer), "parameters": parameters, "starts": starts}


def waits_inside_closures(steps: int) -> dict[str, Any]:
    """How often a store behind a closure's forward would have to wait for the snapshot that is taken with that forward."""
    from shardd.torch import commit, fully_shard

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    # The copy takes longer than the forward.
    model.table = torch.nn.Parameter(torch.zeros(32 << 20), requires_grad=False)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    waits = []
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(1, 64)).square().mean()
            engine = model._get_fsdp_state()._job.engine
            before = engine.client_counters()["waits"]
            engine.await_store()
            waits.append(engine.client_counters()["waits"] - before)
            loss.backward()
            return loss

        optimizer.step(closure)
    commit(model)
    return {"waits": waits}


def steps_without_and_with_optimizer(impl: str) -> dict[str, Any]:
    """Passes without a step, two optimizers, one of which has state that cannot be kept."""
    rank = dist.get_rank()
    model = model_of(impl)
    first = torch.optim.AdamW(model.layers.parameters(), lr=1e-2)
    rest = [p for n, p in model.named_parameters() if not n.startswith("layers.")]

    class Listing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for param in rest:
                self.state[param]["history"] = [p.detach().clone() for p in rest] * 50
            return result

    second = Listing(rest, lr=0.1)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        losses.append(loss.item())
        if step != 2:  # its gradients add up with the next
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    if impl == "shardd":
        from shardd.torch import commit

        commit(model)
    return {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_steps() -> tuple[dict[str, Any], dict[str, Any]]:
    return steps_without_and_with_optimizer("torch"), steps_without_and_with_optimizer("shardd")


def refused() -> dict[str, Any]:
    """Optimizers whose state cannot be kept; nothing is written before they are refused."""
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    for name in ("LBFGS", "Adafactor"):
        model = model_of("shardd")
        optimizer = getattr(torch.optim, name)(list(model.parameters()), lr=1e-2)
        loss_of(model, 0, 0, rank).backward()
        before = parameters_of(model)
        error = ""
        try:
            optimizer.step(lambda: torch.zeros(())) if name == "LBFGS" else optimizer.step()
        except NotImplementedError as caught:
            error = str(caught)
        after = parameters_of(model)
        same = all(torch.equal(after[n], v) for n, v in before.items())
        out[name] = (error, same and len(optimizer.state) == 0)
    return out


def loaded_before_registration(impl: str) -> dict[str, Any]:
    """State and parameters from an earlier model, loaded into one that has not run."""
    model = model_of(impl)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = train_steps(model, optimizer, range(2))
    saved = [{n: v.clone() for n, v in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict())]
    model = model_of(impl)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    homes = []
    if impl == "shardd":
        loss_of(model, 9, 0, 0).backward()  # registers
        optimizer.zero_grad()
        homes = [
            in_the_jobs_memory(s["exp_avg"].to_local())
            for s in optimizer.state.values()
            if s["exp_avg"].to_local().numel()
        ]
    losses += train_steps(model, optimizer, range(2, 4))
    return {"losses": losses, "homes": homes}


def both_loaded() -> tuple[dict[str, Any], dict[str, Any]]:
    return loaded_before_registration("torch"), loaded_before_registration("shardd")


def too_much_rides() -> dict[str, Any]:
    """The program's own state and what the optimizer needs are more than a commit takes, together."""
    import pickle

    from shardd.torch import resume, ride

    model = model_of("shardd")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = bytes((1 << 20) - 200)
    ride(own)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    error = ""
    try:
        optimizer.step()
    except ValueError as caught:
        error = str(caught)
    ride(own[:-2000])
    loss_of(model, 1, 0, dist.get_rank()).backward()
    optimizer.step()
    from shardd.torch import commit

    commit(model)
    return {"error": error, "own": len(pickle.dumps(own)), "rode": len(resume(model)[1]),
            "parameters": len(list(model.parameters()))}  # fmt: skip


def found_without_a_look_at_every_object() -> dict[str, Any]:
    """Optimizers made before the package is imported, after it, as copies and by pickle; who is collected is forgotten."""
    import gc
    import pickle

    early = model_of("torch")  # nothing of the package is imported yet
    before = torch.optim.AdamW(early.parameters(), lr=1e-2)
    import shardd.torch  # noqa: F401
    from shardd.torch._torch_optimizers.live_optimizers import optimizers_of

    looks = []
    every_object = gc.get_objects
    gc.get_objects = lambda *args, **kwargs: looks.append(1) or every_object(*args, **kwargs)  # type: ignore[func-returns-value]
    try:
        found = [optimizers_of(early.parameters(), but_not=lambda _: False) == [before]]
        looked_first = len(looks)
        late = model_of("torch")
        made = torch.optim.SGD(late.parameters(), lr=0.1)
        found.append(optimizers_of(late.parameters(), but_not=lambda _: False) == [made])
        copied = copy.copy(made)
        found.append(optimizers_of(late.parameters(), but_not=lambda _: False) == [made, copied])
        read = pickle.loads(pickle.dumps(torch.optim.SGD([torch.zeros(2)], lr=0.1)))
        found.append(optimizers_of(read.param_groups[0]["params"], but_not=lambda _: False) == [read])
        del made, copied
        gc.collect()
        found.append(optimizers_of(late.parameters(), but_not=lambda _: False) == [])
        model = model_of("shardd")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0, 0, dist.get_rank()).backward()
        optimizer.step()
    finally:
        gc.get_objects = every_object
    return {"found": found, "looks": len(looks) - looked_first, "states": len(optimizer.state)}
