"""Runs the programs of unseen_programs.py on PyTorch and under ``install()``, in one process."""

from __future__ import annotations

import gc
import logging
import traceback
from typing import Any

import torch.distributed as dist

from optimizers import own_state_programs, several_open_programs  # noqa: F401
from optimizers.unseen_programs import PROGRAMS


def _run(group: str, impl: str) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name, (program, _) in PROGRAMS[group].items():
        try:
            out[name] = program()
        except Exception:
            out[name] = {"error": traceback.format_exc()}
        model = out[name].pop("model", None)
        if impl == "shardd" and model is not None:
            from shardd.torch import commit, counters

            commit(model)
            dist.barrier()
            out[name]["counters"] = counters(model)
        del model
        gc.collect()
    return out


def both(group: str) -> dict[str, Any]:
    import shardd.torch

    stock = _run(group, "torch")
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardd.torch").addHandler(handler)
    shardd.torch.install()
    ours = _run(group, "shardd")
    shardd.torch.uninstall()
    return {"torch": stock, "shardd": ours, "said": [text for text in said if "steps here, not in the daemon" in text]}
