"""The programs, and what is special about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.programs import (
    adapters,
    adversaries,
    checkpoints,
    evaluation,
    language,
    loops,
    mixture,
    precision,
    tying,
    unet,
    vit,
)
from training.programs.script import Script

__all__ = ["PROGRAMS", "Program"]


@dataclass(frozen=True)
class Program:
    run: Callable[[Script], list[Any]]
    kill: tuple[str, int, int, str]  # form, rank, steps that it has made, moment (program_scenarios.py)
    stock: bool = False  # it is killed with PyTorch's optimizers
    plain: bool = False  # compared with a run without sharding, too
    cannot: tuple[str, ...] = ()  # forms in which PyTorch fails
    trainers: tuple[str, ...] = ()  # forms in which the daemon does not make the steps
    loose: float = 0.0  # relative tolerance where bf16 or fp16 round sums differently


_FORMS = ("fully_shard", "wrapper")

PROGRAMS = {
    program.run.__name__: program
    for program in (
        Program(language.nano_gpt, ("fully_shard", 1, 3, "backward"), loose=1e-3),
        Program(tying.weight_tying, ("wrapper", 0, 2, "forward"), plain=True, cannot=("wrapper",)),
        Program(mixture.experts, ("fully_shard", 0, 3, "before")),
        Program(mixture.left_out_experts, ("fully_shard", 1, 5, "backward"), stock=True),
        Program(vit.vit, ("fully_shard", 1, 3, "forward"), stock=True),
        Program(unet.unet, ("wrapper", 0, 2, "backward")),
        Program(adapters.lora, ("fully_shard", 1, 2, "after")),
        Program(adapters.qlora, ("wrapper", 0, 2, "backward"), trainers=("wrapper",)),
        Program(precision.fp16_scaler, ("fully_shard", 1, 5, "before")),
        Program(precision.compiled, ("fully_shard", 0, 3, "before")),
        Program(evaluation.evaluation_in_between, ("wrapper", 1, 2, "after"), plain=True, cannot=_FORMS),
        Program(evaluation.early_stopping, ("fully_shard", 1, 4, "forward"), plain=True, loose=1e-3),
        Program(checkpoints.resume_dcp, ("fully_shard", 0, 5, "backward"), stock=True),
        Program(checkpoints.resume_torch_save, ("wrapper", 1, 4, "after"), cannot=("wrapper",)),
        Program(checkpoints.moving_average, ("fully_shard", 0, 2, "forward"), plain=True, cannot=("wrapper",)),
        Program(loops.stochastic_depth, ("fully_shard", 1, 4, "before"), plain=True),
        Program(loops.curriculum, ("wrapper", 1, 2, "backward"), stock=True, plain=True),
        Program(loops.rollouts, ("fully_shard", 0, 3, "forward"), plain=True),
        Program(adversaries.gradient_penalty, ("fully_shard", 1, 2, "before"), plain=True, cannot=_FORMS),
        Program(adversaries.spectral, ("wrapper", 0, 2, "after"), plain=True),
        Program(adversaries.gan, ("fully_shard", 1, 3, "after"), plain=True),
        Program(adversaries.distillation, ("fully_shard", 0, 2, "backward"), plain=True),
    )
}
