"""Lightning's Trainer: FSDPStrategy (PyTorch's version 1) or ModelParallelStrategy (version 2); fit, checkpoint, resume."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from common import Record, Sentences, parser, tiny_llama


class CpuFSDPStrategy(FSDPStrategy):
    """Lightning refuses its own FSDPStrategy where there is no GPU; a derived one it takes."""


class LanguageModel(lightning.LightningModule):
    def __init__(self, record: Record, name: str, version: int) -> None:
        super().__init__()
        self.record, self.name, self.version = record, name, version
        self.model = tiny_llama()

    def configure_model(self) -> None:
        if isinstance(self.model, (FSDPModule, FullyShardedDataParallel)):
            return
        if (
            self.version == 1
        ):  # by hand, as the strategy says nothing of the device, and PyTorch asks for one that is no CPU
            policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
            self.model = FullyShardedDataParallel(
                self.model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
            )
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.record.add(f"{self.name} loss", mean)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(Sentences(256), batch_size=4)


def trainer(out: Path, strategy: Any, args: Any) -> lightning.Trainer:
    checkpoints = ModelCheckpoint(dirpath=out, every_n_train_steps=args.steps // 2, save_top_k=-1, filename="{step}")
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=args.steps,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None if args.strategy == "fsdp" else 1.0,
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--strategy", choices=("fsdp", "model_parallel"), default="model_parallel")
    args = options.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

    def strategy(sharded_files: bool) -> Any:
        if args.strategy == "model_parallel":
            return ModelParallelStrategy(2, 1, save_distributed_checkpoint=sharded_files)
        return CpuFSDPStrategy(state_dict_type="sharded" if sharded_files else "full")

    version = 1 if args.strategy == "fsdp" else 2
    record = Record(args.out, int(os.environ["RANK"]))
    # On CPUs PyTorch's version 1 crashes where a full state dict is rank 0's only, as Lightning wants it.
    for kind in ("sharded", "full") if version == 2 else ("sharded",):
        out = args.out / kind
        first = trainer(out, strategy(kind == "sharded"), args)
        first.fit(LanguageModel(record, kind, version))
        again = trainer(args.out / f"{kind}_again", strategy(kind == "sharded"), args)
        again.fit(
            LanguageModel(record, f"{kind} resumed", version), ckpt_path=str(out / f"step={args.steps // 2}.ckpt")
        )
    record.write()
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
