"""What ranks do in the tests of stores into parameters: threads, system calls and a fault handler of the program's."""

from __future__ import annotations

import faulthandler
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from models import loss_of
from optimizers.optim_cases import full, model_of, optimizer_of


def stores(folder: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    loss_of(model, 0, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    with open(f"{folder}/report{rank}", "w+") as report:
        faulthandler.enable(report)  # after the library has whatever handler it has
        weight = model.layers[0].up.weight.detach().to_local()
        thread = threading.Thread(target=lambda: weight.fill_(0.25))
        thread.start()
        thread.join()
        row = model.layers[1].up.weight.detach().to_local()
        with open(f"{folder}/values{rank}", "wb+") as values:
            values.write(torch.full_like(row, 0.5).numpy().tobytes())
            values.seek(0)
            values.readinto(memoryview(row.numpy()).cast("B"))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # rank 0 reads what the others have stored where it lies
        gathered = full(model.layers[0].up.weight)
        with torch.no_grad():
            loss = loss_of(model, 1, 0, 0).item()  # all ranks compute with what all have stored
        faulthandler.disable()
        report.seek(0)
        text = report.read()
    return {
        "report": text,
        "saved": rank != 0
        or bool((state["layers.0.up.weight"] == 0.25).all() and (state["layers.1.up.weight"] == 0.5).all()),
        "loss": loss,
        "filled": bool((gathered == 0.25).all()),
        "read": bool((full(model.layers[1].up.weight) == 0.5).all()),
    }
