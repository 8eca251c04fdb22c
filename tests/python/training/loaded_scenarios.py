"""A program that is restarted and loads a checkpoint of its own before it uses its model."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from models import Block, Case, build, loss_of, shard
from training.programs.script import Script


def _sharded(form: str) -> Any:
    from shardd.torch import FullyShardedDataParallel, fully_shard

    model = build(Case())
    if form == "fully_shard":
        shard(model, Case(), fully_shard)
        return model
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )


def restarted(form: str, optimizer_kind: str, loads: str, asks: bool, folder: str) -> dict[str, Any]:
    """Three steps, of which the first is saved. The second attempt loads that, ``asks`` for committed steps or does not, and
    makes steps 1 and 2 again."""
    from shardd.torch import counters, load_safetensors, optim, resume, save_safetensors

    model = _sharded(form)
    kind: Any = (optim if optimizer_kind == "daemon" else torch.optim).AdamW
    optimizer = kind(model.parameters(), lr=1e-2)
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    file = f"{folder}/{dist.get_rank()}.pt"
    begin = 0
    if again:
        saved = torch.load(file, weights_only=False)
        if loads == "safetensors":
            load_safetensors(model, folder)
        else:
            set_model_state_dict(model, saved["model"], options=StateDictOptions(full_state_dict=True))
        if loads == "all":
            optimizer.load_state_dict(saved["optimizer"])
        begin = 1
    said = resume(model)[0] if again and asks else -1
    losses = []
    for step in range(begin, 3):
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 0:
            state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}
            torch.save({"model": state, "optimizer": optimizer.state_dict()}, file)
            save_safetensors(model, folder)
    result = {"losses": losses, "said": said, "parameters": Script(form, None, True).parameters(model)}  # type: ignore[arg-type]
    result["counted"] = sorted({float(entry["step"]) for entry in optimizer.state.values()})
    torch.save(result, f"{folder}/{dist.get_rank()}-{int(again)}.result")
    dist.barrier()
    if not again:
        sys.exit(3)
    return {**result, "counters": counters(model)}


def asks_late(folder: str) -> dict[str, Any]:
    """The second attempt asks for what was committed when it has used what it loaded."""
    from shardd.torch import optim, resume

    model = _sharded("fully_shard")
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    if again:
        local = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        model.load_state_dict(local)
    said = ""
    try:
        loss = loss_of(model, 0, 0, dist.get_rank())
        if again:
            resume(model)
    except RuntimeError as error:
        said = str(error)
    else:
        loss.backward()
        optimizer.step()
    if not again:
        dist.barrier()
        sys.exit(3)
    return {"said": said}
