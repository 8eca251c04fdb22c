"""torchtitan itself: its Trainer with its Llama 3, sharding, activation checkpointing, loss in chunks, accumulation, clipping, schedule
and checkpoints. Trains, and once more from the checkpoint in the middle. No download."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as titan_utils


class Cpu:
    """What torchtitan asks of an accelerator's module, for the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


if not hasattr(torch.distributed, "set_timeout"):  # torchtitan 0.3 is made for a later torch
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
titan_utils.device_type, titan_utils.device_module = "cpu", Cpu()  # type: ignore[assignment]  # else CUDA, present or not

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from common import LENGTH, VOCABULARY, Record, Sentences, parser  # noqa: E402

BATCH = 4


class Words(BaseTokenizer):
    """Tokens are given as they are."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Data(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.batches = Sentences(1024).tokens.unflatten(0, (-1, dp_world_size, BATCH))[:, dp_rank]
        self.next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            batch = self.batches[self.next % len(self.batches)]
            self.next += 1
            yield {"input": batch[:, :-1]}, batch[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next = state_dict["next"]


def config(out: Path, steps: int) -> Any:
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on CPUs
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(
            num_chunks=3, loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
        model_spec=spec,
        dump_folder=str(out),
        tokenizer=Words.Config(),
        dataloader=Data.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=2, decay_ratio=0.8, decay_type="linear", min_lr_factor=0.0
        ),
        training=TrainingConfig(
            local_batch_size=BATCH,
            global_batch_size=4 * BATCH,
            seq_len=LENGTH - 1,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False),
        activation_checkpoint=FullAC.Config(),
    )


def train(out: Path, steps: int, record: Record, name: str) -> None:
    trainer = config(out, steps).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale

    def log(step: int, loss: float, most: float, norm: float, **_: Any) -> None:
        record.add(f"{name} loss", loss)
        record.add(f"{name} norm", norm)

    trainer.metrics_processor.log = log
    trainer.metrics_processor.should_log = lambda step: True
    trainer.train()
    trainer.close()


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    record = Record(args.out, int(os.environ["RANK"]))
    train(args.out, args.steps, record, "whole")
    torch.distributed.barrier()
    if record.rank == 0:
        shutil.rmtree(args.out / "checkpoint" / f"step-{args.steps}")
    torch.distributed.barrier()
    train(args.out, args.steps, record, "resumed")
    record.write()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
