"""Programs that look at their optimizer from all sides, for test_unseen.py: on PyTorch, and under ``install()``.

Each returns what it has seen, and knows nothing of shardd. ``daemon`` says whether the daemon is to make its steps at the end.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from models import Case, loss_of, shard
from models import build as build_model
from optimizers.optim_cases import full, full_state, parameters_of, train_scaled

Program = Callable[[], dict[str, Any]]
PROGRAMS: dict[str, dict[str, tuple[Program, bool]]] = {}  # by group and name

KINDS: dict[str, Callable[..., Any]] = {
    "Adam": lambda p, **more: torch.optim.Adam(p, **{"lr": 1e-2, "weight_decay": 0.1, **more}),
    "AdamW": lambda p, **more: torch.optim.AdamW(p, **{"lr": 1e-2, **more}),
    "RMSprop": lambda p, **more: torch.optim.RMSprop(
        p, **{"lr": 1e-3, "centered": True, "momentum": 0.9, "eps": 1e-2, **more}
    ),
    "SGD": lambda p, **more: torch.optim.SGD(p, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, **more}),
}


def program(group: str, daemon: bool = True) -> Callable[[Program], Program]:
    def note(function: Program) -> Program:
        PROGRAMS.setdefault(group, {})[function.__name__] = function, daemon
        return function

    return note


def model_of(case: Case | None = None) -> Any:
    from torch.distributed.fsdp import fully_shard  # whatever is there

    model = build_model(case or Case())
    shard(model, case or Case(), fully_shard)
    return model


def backward(model: nn.Module, step: int) -> float:
    loss = loss_of(model, step, 0, dist.get_rank())
    loss.backward()
    return loss.item()


def train(model: nn.Module, optimizer: Any, steps: range | int) -> list[float]:
    losses = []
    for step in steps if isinstance(steps, range) else range(steps):
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def end(model: nn.Module, optimizer: Any, **facts: Any) -> dict[str, Any]:
    """What is compared in the end, and the model, whose counters say who has made the steps."""
    return {**facts, "state": full_state(optimizer), "parameters": parameters_of(model), "model": model}


def look(optimizer: Any, pieces: bool = True) -> dict[str, Any]:
    """``pieces`` False: values and shapes of this rank's pieces are left out, which the wrapper cuts as it likes."""
    kind = type(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [optimizer.state.get(p) for p in params]
    return {
        "type": [kind.__name__, kind.__module__, kind is getattr(torch.optim, kind.__name__), kind.__mro__[1].__name__],
        "class": optimizer.__class__ is kind and type(kind) is type,
        "isinstance": [isinstance(optimizer, k) for k in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)],
        "repr": repr(optimizer),
        "defaults": dict(optimizer.defaults),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "state": [type(optimizer.state).__name__, len(optimizer.state), bool(optimizer.state)],
        "keys": [None if e is None else list(e) for e in entries],
        "kinds": [
            (type(v).__name__, getattr(v, "dtype", None), str(getattr(v, "device", "")), v.shape in ((), p.shape))
            for p, entry in zip(params, entries)
            for v in (entry or {}).values()
        ],
        "values": [[copy.deepcopy(full(v)) for v in e.values()] for e in entries if e and pieces],
        "steps": [float(e["step"]) for e in entries if e and "step" in e],
        "saved": sorted(optimizer.state_dict()),
        "numbers": sorted(optimizer.state_dict()["state"]),
    }


def _looks(kind: str, **more: Any) -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS[kind](model.parameters(), **more)
    seen = [look(optimizer)]
    loss = loss_of(model, 0, 0, dist.get_rank())
    seen.append(look(optimizer))
    loss.backward()
    seen.append(look(optimizer))
    optimizer.step()
    seen.append(look(optimizer))
    optimizer.zero_grad()
    losses = train(model, optimizer, 20)
    step = next((e["step"] for e in optimizer.state.values() if "step" in e), torch.zeros(()))
    before = step.item()
    losses += train(model, optimizer, 1)
    return end(model, optimizer, seen=seen, losses=losses, followed=[before, step.item()])


@program("looks")
def adam() -> dict[str, Any]:
    return _looks("Adam")


@program("looks")
def adamw() -> dict[str, Any]:
    return _looks("AdamW", foreach=True)


@program("looks")
def adamw_fused() -> dict[str, Any]:
    return _looks("AdamW", fused=True)


@program("looks")
def adam_with_decoupled_weight_decay() -> dict[str, Any]:
    return _looks("Adam", decoupled_weight_decay=True)


@program("looks")
def adamw_maximizes() -> dict[str, Any]:
    return _looks("AdamW", maximize=True, lr=1e-3)


@program("looks")
def amsgrad() -> dict[str, Any]:
    return _looks("Adam", amsgrad=True)


@program("looks")
def adamw_with_amsgrad() -> dict[str, Any]:
    return _looks("AdamW", amsgrad=True)


@program("looks")
def rmsprop_centered_with_momentum() -> dict[str, Any]:
    return _looks("RMSprop")


@program("looks")
def sgd() -> dict[str, Any]:
    return _looks("SGD", dampening=0.1)


@program("looks")
def sgd_without_momentum() -> dict[str, Any]:
    return _looks("SGD", momentum=0.0, maximize=True, lr=1e-2)


@program("looks")
def copies_and_pickles() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.named_parameters())
    losses = train(model, optimizer, 2)
    copied = copy.deepcopy(optimizer.state_dict())
    file = io.BytesIO()
    torch.save({"groups": copied["param_groups"], "state": full_state(optimizer)}, file)
    file.seek(0)
    read = torch.load(file)
    names = optimizer.param_groups[0]["param_names"]
    losses += train(model, optimizer, range(2, 4))
    kept = {i: {n: full(v) for n, v in e.items()} for i, e in copied["state"].items()}  # not what followed
    whole = copy.deepcopy(optimizer)
    return end(
        model, optimizer, losses=losses, kept=kept, read=read, names=names, copy=[type(whole).__name__, repr(whole)]
    )


# Steps.


@program("steps")
def hooks() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    calls: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        return lambda o, *rest: calls.append((name, o is optimizer, len(rest), len(o.state)))

    handles = [register_optimizer_step_pre_hook(note("all before")), register_optimizer_step_post_hook(note("all after")),
               optimizer.register_step_pre_hook(note("before")), optimizer.register_step_post_hook(note("after")),
               optimizer.register_state_dict_pre_hook(note("save")),
               optimizer.register_state_dict_post_hook(note("saved")),
               optimizer.register_load_state_dict_pre_hook(note("load")),
               optimizer.register_load_state_dict_post_hook(note("loaded"))]  # fmt: skip
    losses = train(model, optimizer, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(
        lambda o, s: {**s, "param_groups": [{**s["param_groups"][0], "lr": 0.5}]}
    )
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        handle.remove()
    losses += train(model, optimizer, 1)
    return end(model, optimizer, losses=losses, calls=calls, lr=optimizer.param_groups[0]["lr"])


@program("steps")
def gradients() -> dict[str, Any]:
    """Kept, zeroed, written, clipped, stepped twice and not at all."""
    model = model_of()
    optimizer = KINDS["Adam"](model.parameters())
    optimizer.step()  # without any backward, on a model that has not run
    shown = [len(optimizer.state)]
    losses = [backward(model, 0)]
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    shown.append(int(all(p.grad is not None and not full(p.grad).any() for p in model.parameters())))
    losses.append(backward(model, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.grad.mul_(2)
    norm = full(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad()
    shown.append(int(all(p.grad is None for p in model.parameters())))
    optimizer.step()  # and without one after it
    losses.append(backward(model, 2))
    losses.append(backward(model, 3))
    optimizer.step()
    return end(model, optimizer, losses=losses, norm=norm, shown=shown)


@program("steps")
def closures() -> dict[str, Any]:
    """The model's first forward is in the step."""
    model = model_of()
    optimizer = KINDS["SGD"](model.parameters())
    losses = []
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, 0, dist.get_rank())
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return end(model, optimizer, losses=losses)


@program("steps")
def hyperparameters_change() -> dict[str, Any]:
    model = model_of()
    rates = torch.tensor(1e-2)
    optimizer = KINDS["AdamW"](model.parameters(), lr=rates, foreach=False)
    losses = train(model, optimizer, 2)
    rates.mul_(0.1)
    losses += train(model, optimizer, 2)
    optimizer.param_groups[0].update(lr=3e-2, betas=(0.5, 0.6), eps=1e-6, weight_decay=0.3)
    losses += train(model, optimizer, 2)
    optimizer.param_groups[0]["maximize"] = True
    losses += train(model, optimizer, 2)
    return end(model, optimizer, losses=losses, groups=look(optimizer)["groups"])


@program("steps")
def groups_and_frozen_parameters() -> dict[str, Any]:
    """Groups that come between steps, parameters that are frozen or get no gradient."""
    model = model_of(Case(freeze=("layers.1",), skip_grad=(0,)))
    first = [p for n, p in model.named_parameters() if not n.startswith("layers.2")]
    optimizer = KINDS["AdamW"](first)
    losses = train(model, optimizer, 2)
    before = look(optimizer)["keys"]
    optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 3e-2, "weight_decay": 0.0})
    losses += train(model, optimizer, 3)
    return end(model, optimizer, losses=losses, keys=[before, look(optimizer)["keys"]])


@program("steps")
def parameters_edited_in_between() -> dict[str, Any]:
    """Weights clamped, averaged and swapped in for an evaluation, as programs do between steps."""
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    losses = []
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(4):
        losses += train(model, optimizer, range(step, step + 1))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.clamp_(-0.5, 0.5)
                average[name].lerp_(p, 0.5)
            kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.copy_(average[name])
            losses.append(loss_of(model, 9, 0, dist.get_rank()).item())
            model.reshard()
            for name, p in model.named_parameters():
                p.copy_(kept[name])
    return end(model, optimizer, losses=losses)


@program("steps")
def built_after_a_forward() -> dict[str, Any]:
    model = model_of()
    with torch.no_grad():
        losses = [loss_of(model, 9, 0, dist.get_rank()).item()]
    model.reshard()
    optimizer = KINDS["AdamW"](model.parameters())
    losses += train(model, optimizer, 4)
    return end(model, optimizer, losses=losses)


@program("steps")
def one_optimizer_of_two_models() -> dict[str, Any]:
    one, other = model_of(), model_of()
    optimizer = KINDS["AdamW"]([*one.parameters(), *other.parameters()])
    losses = []
    for step in range(4):
        losses += [backward(one, step), backward(other, step + 10)]
        optimizer.step()
        optimizer.zero_grad()
    return end(one, optimizer, losses=losses, other=parameters_of(other))


@program("steps")
def another_optimizer_takes_over() -> dict[str, Any]:
    """A second phase of a program: the first optimizer goes, with its state, in the middle of training."""
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    losses = train(model, optimizer, 3)
    del optimizer
    optimizer = KINDS["SGD"](model.parameters())
    losses += train(model, optimizer, range(3, 6))
    return end(model, optimizer, losses=losses)


# Schedulers and scaling.


def _scheduled(make: Callable[[Any], Any], kind: str = "AdamW", **more: Any) -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS[kind](model.parameters(), **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = make(optimizer)
        losses, rates = [], []
        for step in range(8):
            losses += train(model, optimizer, range(step, step + 1))
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
            rates.append([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    called = getattr(optimizer, "_opt_called", None)
    said = sorted({str(w.message) for w in caught if "lr_scheduler" in str(w.message)})
    return end(model, optimizer, losses=losses, rates=rates, called=called, said=said)


@program("schedules")
def one_cycle_which_moves_betas() -> dict[str, Any]:
    return _scheduled(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=20))


@program("schedules")
def one_cycle_which_moves_momentum() -> dict[str, Any]:
    return _scheduled(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20), "SGD")


@program("schedules")
def warmup_then_cosine() -> dict[str, Any]:
    return _scheduled(
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
        )
    )


@program("schedules")
def on_plateau() -> dict[str, Any]:
    return _scheduled(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1))


@program("schedules")
def lambdas_on_a_tensor() -> dict[str, Any]:
    return _scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n), lr=torch.tensor(1e-2), foreach=False)


@program("schedules")
def scheduler_before_the_first_step() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
        losses = train(model, optimizer, 2)
        scheduler.step()
    return end(model, optimizer, losses=losses, warned=sum("lr_scheduler.step()" in str(w.message) for w in caught))


def _scaled(kind: str, **more: Any) -> dict[str, Any]:
    """Unscaled by the program or by the scaler; one step overflows on one rank, another on the other."""
    model = model_of()
    optimizer = KINDS[kind](model.parameters(), **more)
    losses, scales = train_scaled(model, optimizer, 8, {(3, 0), (4, 1)})
    return end(model, optimizer, losses=losses, scales=scales)


@program("schedules")
def grad_scaler() -> dict[str, Any]:
    return _scaled("AdamW")


@program("schedules")
def grad_scaler_of_a_fused_optimizer() -> dict[str, Any]:
    return _scaled("AdamW", fused=True)


# State dicts.


@program("loads")
def saved_and_loaded_before_and_after_the_first_step() -> dict[str, Any]:
    out: dict[str, Any] = {}
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    train(model, optimizer, 3)
    state = {n: full(p) for n, p in model.named_parameters()}
    saved = copy.deepcopy(optimizer.state_dict())
    out["on"] = train(model, optimizer, range(3, 6))
    for when in ("before", "after"):
        model = model_of()
        optimizer = KINDS["AdamW"](model.parameters(), lr=0.5)
        if when == "after":
            train(model, optimizer, range(7, 9))
        else:
            optimizer.load_state_dict(copy.deepcopy(saved))
            out["seen before"] = look(optimizer)
        with torch.no_grad():
            for name, p in model.named_parameters():
                rows = state[name].chunk(dist.get_world_size())
                if dist.get_rank() < len(rows):
                    p.to_local().copy_(rows[dist.get_rank()])
        if when == "after":
            optimizer.load_state_dict(copy.deepcopy(saved))
        out[f"loaded {when}"] = train(model, optimizer, range(3, 6))
        out[f"seen {when}"] = look(optimizer)
    return end(model, optimizer, **out)


@program("loads")
def loaded_with_less_state() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    losses = train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {i: entry for i, entry in saved["state"].items() if i % 2}
    optimizer.load_state_dict(saved)
    keys = [look(optimizer)["keys"]]
    losses += train(model, optimizer, 2)
    return end(model, optimizer, losses=losses, keys=keys)


@program("loads")
def distributed_state_dicts_of_a_fresh_optimizer() -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    fresh = copy.deepcopy(get_optimizer_state_dict(model, optimizer))  # torch makes a step of zeros
    seen = look(optimizer)
    losses = train(model, optimizer, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, 1)
    set_optimizer_state_dict(model, optimizer, saved)
    losses += train(model, optimizer, 2)
    other = KINDS["AdamW"](model_of().parameters())
    steps = {n: float(e["step"]) for n, e in fresh["state"].items()}
    return end(model, optimizer, losses=losses, seen=seen, steps=steps, keys=sorted(saved["state"]), other=look(other))


@program("loads")
def distributed_state_dict_before_the_first_step() -> dict[str, Any]:
    """Of a model that has run: torch makes a step of zeros."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    with torch.no_grad():
        losses = [loss_of(model, 9, 0, dist.get_rank()).item()]
    model.reshard()
    fresh = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    losses += train(model, optimizer, 3)
    return end(model, optimizer, losses=losses, steps={n: float(e["step"]) for n, e in fresh["state"].items()})


# The wrapper.


def _wrapped(orig: bool, *, unused: bool = False, early: bool = False) -> dict[str, Any]:
    """``unused``: one parameter of a layer is. ``early``: the optimizer has the parameters before they are wrapped, as
    ``use_orig_params`` keeps the objects."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    inner = build_model(Case())
    optimizer = KINDS["AdamW"](inner.parameters()) if early else None
    if unused:
        layer = inner.layers[1]
        layer.forward = lambda x, scale=None: x + layer.down(torch.tanh(layer.up(layer.norm(x))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            inner,
            auto_wrap_policy=ModuleWrapPolicy({type(inner.layers[0])}),
            use_orig_params=orig,
            device_id=torch.device("cpu"),
        )
        optimizer = optimizer or KINDS["AdamW"](model.parameters())
        losses = train(model, optimizer, 3)
        seen = [look(optimizer, pieces=False)]
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            whole = FullyShardedDataParallel.optim_state_dict(model, optimizer)  # on CPUs PyTorch's values are wrong
            kept = {n: [list(e), float(e["step"]), e["exp_avg"].shape] for n, e in whole["state"].items()}
        saved = copy.deepcopy(optimizer.state_dict())
        losses += train(model, optimizer, 2)
        optimizer.load_state_dict(saved)
        seen.append(look(optimizer, pieces=False))
        losses += train(model, optimizer, 2)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "seen": seen, "kept": kept, "parameters": parameters, "model": model}


@program("wrapper")
def original_parameters() -> dict[str, Any]:
    return _wrapped(True)


@program("wrapper")
def flat_parameters() -> dict[str, Any]:
    return _wrapped(False)


@program("wrapper")
def original_parameters_of_which_some_are_unused() -> dict[str, Any]:
    return _wrapped(True, unused=True)


@program("wrapper")
def flat_parameters_of_which_some_are_unused() -> dict[str, Any]:
    """One is in a FlatParameter with others: its gradient is zeros there."""
    return _wrapped(False, unused=True)


@program("wrapper")
def built_before_the_wrapper() -> dict[str, Any]:
    return _wrapped(True, early=True)


# What the daemon does not do: all of the model's optimizers are PyTorch's.


@program("falls back", daemon=False)
def amsgrad_of_one_group() -> dict[str, Any]:
    model = model_of()
    params = list(model.parameters())
    optimizer = KINDS["Adam"]([{"params": params[:2]}, {"params": params[2:], "amsgrad": True}])
    return end(model, optimizer, losses=train(model, optimizer, 4))


@program("changes hands")
def amsgrad_for_a_step() -> dict[str, Any]:
    """Set between a backward and its step, in the middle of training; torch's raises, as its state has no maximum."""
    model = model_of()
    optimizer = KINDS["Adam"](model.parameters())
    losses = train(model, optimizer, 2)
    losses.append(backward(model, 2))
    optimizer.param_groups[0]["amsgrad"] = True
    error = ""
    try:
        optimizer.step()
    except KeyError as raised:
        error = str(raised)
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.step()
    optimizer.zero_grad()
    losses += train(model, optimizer, range(3, 6))
    return end(model, optimizer, losses=losses, error=error)


@program("changes hands")
def amsgrad_and_new_state() -> dict[str, Any]:
    """From one step to the next."""
    model = model_of()
    optimizer = KINDS["Adam"](model.parameters())
    losses = train(model, optimizer, 2)
    losses.append(backward(model, 2))
    optimizer.state.clear()
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.step()
    optimizer.zero_grad()
    losses += train(model, optimizer, range(3, 6))
    return end(model, optimizer, losses=losses, seen=look(optimizer))


@program("falls back", daemon=False)
def a_step_of_its_own() -> dict[str, Any]:
    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
            return super().step(closure)

    model = model_of()
    optimizer = Own(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, 4)
    return end(
        model, optimizer, losses=losses, kinds=[isinstance(optimizer, torch.optim.AdamW), type(optimizer) is Own]
    )


@program("falls back", daemon=False)
def two_optimizers_of_which_one_is_derived() -> dict[str, Any]:
    class Own(torch.optim.SGD):
        pass

    model = model_of()
    decay = KINDS["AdamW"]([p for p in model.parameters() if p.ndim > 1])
    rest = Own([p for p in model.parameters() if p.ndim <= 1], lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        losses.append(backward(model, step))
        for optimizer in (decay, rest):
            optimizer.step()
            optimizer.zero_grad()
    return end(model, decay, losses=losses, rest=full_state(rest))


@program("falls back", daemon=False)
def a_second_optimizer_steps_at_once() -> dict[str, Any]:
    """Between a backward and the next forward, with the same gradients."""
    model = model_of()
    first = KINDS["AdamW"](model.parameters())
    losses = train(model, first, 2)
    losses.append(backward(model, 2))
    first.step()
    second = KINDS["SGD"](model.parameters())
    second.step()
    first.step()
    first.zero_grad()
    losses += train(model, second, range(3, 5))
    return end(model, first, losses=losses, second=full_state(second))


@program("changes hands")
def state_that_is_reset() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    losses = train(model, optimizer, 3)
    optimizer.state = defaultdict(dict)
    seen = [look(optimizer)["keys"]]
    losses += train(model, optimizer, 3)
    return end(model, optimizer, losses=losses, seen=seen)


@program("changes hands")
def groups_that_are_cut_anew() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["SGD"](model.parameters())
    losses = train(model, optimizer, 2)
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "params": [group["params"].pop()], "lr": 1e-2})
    losses += train(model, optimizer, 3)
    return end(model, optimizer, losses=losses)


@program("falls back", daemon=False)
def parameters_in_bfloat16() -> dict[str, Any]:
    model = model_of(Case(stored="bf16"))
    optimizer = KINDS["AdamW"](model.parameters(), foreach=True)
    losses = train(model, optimizer, 2)
    dtypes = {str(v.dtype) for e in optimizer.state.values() for v in e.values()}
    return {"losses": losses, "dtypes": sorted(dtypes), "model": model}


@program("falls back", daemon=False)
def a_parameter_that_is_not_sharded() -> dict[str, Any]:
    model = model_of()
    torch.manual_seed(3)
    beside = nn.Linear(13, 1)
    optimizer = KINDS["AdamW"]([*model.parameters(), *beside.parameters()])
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, dist.get_rank()) + beside(torch.ones(13)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return end(model, optimizer, losses=losses, beside=parameters_of(beside))
