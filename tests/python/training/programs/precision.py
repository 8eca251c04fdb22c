"""fp16 with a scaler, and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from training.programs.nets import Layer, Net
from training.programs.script import Script, data

__all__ = ["compiled", "fp16_scaler"]


def fp16_scaler(script: Script) -> list[Any]:
    """Parameters in fp16 for compute, a loss whose scale grows until it overflows on one rank, and then on the other."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = script.shard(Net(depth=3), Layer, precision=torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    kind: Any = ShardedGradScaler if script.form == "wrapper" else torch.amp.GradScaler
    scaler = kind(device="cpu", init_scale=2.0**10, growth_factor=4.0, growth_interval=2)
    _, kept = script.resume(model)
    seen: list[Any] = []
    done = 0
    if kept is not None:
        seen, done, state = kept
        # It rode as it was before a step that was not skipped: no job commits those.
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["scale"], state["_growth_tracker"] = state["scale"] * state["growth_factor"], 0
        scaler.load_state_dict(state)
        done, seen = done + 1, [*seen, state["scale"]]
    for step in range(done, 9):
        loss = model(data(step, 4, 5)).float().square().mean()
        if (step, dist.get_rank()) in ((4, 0), (6, 1)):
            loss = loss * 1e6
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            seen.append(script.clip(model, 1.0))
        seen.append(loss.item())
        script.ride((seen, step, scaler.state_dict()))
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad()
    return [*seen, *script.parameters(model)]


def compiled(script: Script) -> list[Any]:
    """Layers are compiled each on its own, after sharding, or the model as a whole; in training and in evaluation."""
    torch._dynamo.reset()
    model = script.shard(Net(depth=3), Layer)
    if script.form == "fully_shard":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        run = model
    else:
        run = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    start, kept = script.resume(model)
    seen: list[Any] = kept or []
    for step in range(start, 5):
        loss = run(data(step, 4 if step < 3 else 3, 5)).square().mean()  # another size of batches
        loss.backward()
        seen.append(loss.item())
        script.ride(seen)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            model.eval()
            with torch.no_grad():
                run(data(9, 4, 5))
            model.train()
    assert not any("_orig_mod" in name for name, _ in model.named_parameters())
    return [*seen, *script.parameters(model)]
