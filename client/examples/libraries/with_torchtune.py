"""torchtune's way: its models, its sharding, loading, saving and scaling of gradients, put together as its recipes for full and
for LoRA fine-tuning on several devices put them together. No download."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtune import training
from torchtune.models.llama3_1 import llama3_1, lora_llama3_1
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import LoRALinear, get_adapter_params, get_adapter_state_dict, set_trainable_params

from common import LENGTH, VOCABULARY, Record, Sentences, parser

MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": LENGTH,
    "intermediate_dim": 48,
}
LORA: dict[str, Any] = {
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}
ACCUMULATE = 2
CPU = torch.device("cpu")


class Run:
    """A recipe: model, optimizer and schedule, and the loop over them."""

    def __init__(self, base: dict[str, torch.Tensor], lora: bool, adapter: dict[str, torch.Tensor] | None, steps: int):
        with torch.device("meta"):
            model: Any = lora_llama3_1(**LORA, **MODEL) if lora else llama3_1(**MODEL)
        if lora:
            set_trainable_params(model, get_adapter_params(model))
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
        conditions = [partial(training.get_shard_conditions, names_to_match=["tok_embeddings"])]
        training.shard_model(model, conditions, cpu_offload=False, reshard_after_forward=True)
        if adapter is not None:
            training.load_from_full_model_state_dict(model, dict(adapter), CPU)
        for module in model.modules():
            if lora and adapter is None and isinstance(module, LoRALinear):
                module.to_empty(device=CPU)
                torch.manual_seed(17)
                module.initialize_parameters()
            if hasattr(module, "rope_init"):
                with CPU:
                    module.rope_init()
        training.load_from_full_model_state_dict(model, dict(base), CPU, strict=not lora)
        training.validate_no_params_on_meta_device(model)
        self.loss = CEWithChunkedOutputLoss()
        model.set_num_output_chunks(self.loss.num_output_chunks)
        self.model, self.step = model, 0
        self.optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        self.scheduler = training.get_cosine_schedule_with_warmup(self.optimizer, 1, 2 * steps)

    def train(self, until: int, record: Record, name: str) -> None:
        world = dist.get_world_size()
        data = Sentences(512).tokens.unflatten(0, (-1, world, 4))
        while self.step < until:
            total, tokens = torch.zeros(()), torch.zeros((), dtype=torch.long)
            for number in range(ACCUMULATE):
                batch = data[self.step * ACCUMULATE + number, dist.get_rank()]
                labels = torch.hstack((batch[:, 1:], torch.full((len(batch), 1), self.loss.ignore_index)))
                count = (labels != self.loss.ignore_index).sum()
                loss = self.loss(self.model(batch), labels) * count
                tokens += count
                total += loss.detach()
                loss.backward()
            dist.all_reduce(tokens)
            dist.all_reduce(total)
            training.scale_grads(self.model, world / tokens)
            norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
            record.add(f"{name} norm", norm.full_tensor())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
            record.add(f"{name} loss", total / tokens)
            self.step += 1

    def whole(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Model and optimizer, on rank 0."""
        rank0 = dist.get_rank() == 0
        return (
            training.gather_cpu_state_dict(self.model, rank0, device=CPU),
            training.get_full_optimizer_state_dict(self.model, self.optimizer, rank0, device=CPU),
        )

    def resume(self, optimizer: dict[str, Any], step: int) -> None:
        training.load_from_full_optimizer_state_dict(self.model, self.optimizer, optimizer, CPU)
        self.step = step


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    record = Record(args.out, rank)
    torch.manual_seed(11)
    values = {name: value.detach().clone() for name, value in llama3_1(**MODEL).state_dict().items()}
    for lora in (False, True):
        name = "LoRA" if lora else "full"
        first = Run(values, lora, None, args.steps)
        first.train(args.steps // 2, record, f"{name}, first half")
        model, optimizer = first.whole()
        if rank == 0:
            torch.save({"model": model, "optimizer": optimizer}, args.out / f"{name}.pt")
        first.train(args.steps, record, f"{name}, second half")
        dist.barrier()
        saved = torch.load(args.out / f"{name}.pt", weights_only=True)  # as recipes do, on every rank
        adapter = get_adapter_state_dict(saved["model"]) if lora else None
        second = Run(values if lora else saved["model"], lora, adapter, args.steps)
        second.resume(saved["optimizer"], args.steps // 2)
        second.train(args.steps, record, f"{name}, second half again")
    record.write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
