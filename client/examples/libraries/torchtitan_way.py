"""Sharding applied as torchtitan applies it, written here in its pattern: meta device, a group for each block, one for the last
norm and the head together, gradients summed and not averaged, accumulation, clipping through DTensor norms, DCP."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common import VOCABULARY, Record, Sentences, parser

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w1, self.w2 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(-2))
        return x + self.w2(nn.functional.silu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(layers)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def init_weights(self) -> None:
        """The same values for any number of ranks: random numbers of a DTensor are those of the whole tensor."""
        torch.manual_seed(11)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.05)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        result: torch.Tensor = self.output(self.norm(h))
        return result


def apply_fsdp(model: Transformer, mesh: DeviceMesh) -> None:
    config: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32)}
    fully_shard(model.tok_embeddings, **config, reshard_after_forward=True)
    for number, block in model.layers.items():
        fully_shard(block, **config, reshard_after_forward=int(number) < len(model.layers) - 1)
    fully_shard([model.norm, model.output], **config, reshard_after_forward=False)
    fully_shard(model, **config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of pre-multiplied values
    blocks = [model.tok_embeddings, *model.layers.values()]
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


class Trainer(Stateful):
    """What is saved: model, optimizer and scheduler under flat names, and where the run stands."""

    def __init__(self, model: Transformer, steps: int) -> None:
        self.model, self.step = model, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), foreach=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / (2 * steps))
        self.flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=self.flat),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=self.flat)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients, 2.0)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def build(mesh: DeviceMesh, steps: int) -> Trainer:
    with torch.device("meta"):
        model = Transformer()
    apply_fsdp(model, mesh)
    model.to_empty(device="cpu")
    model.init_weights()
    return Trainer(model, steps)


def train(trainer: Trainer, until: int, record: Record, name: str) -> None:
    model, world, micro_batches = trainer.model, dist.get_world_size(), 2
    data = Sentences(512).tokens.unflatten(0, (-1, world, 4))
    while trainer.step < until:
        trainer.optimizer.zero_grad()
        losses = []
        for number in range(micro_batches):
            last = number == micro_batches - 1
            model.set_requires_gradient_sync(last)  # type: ignore[operator]
            model.set_is_last_backward(last)  # type: ignore[operator]
            tokens = data[trainer.step * micro_batches + number, dist.get_rank()]
            logits = model(tokens[:, :-1])
            total = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            loss = total / (tokens[:, 1:].numel() * world * micro_batches)
            loss.backward()
            losses.append(loss.detach())
        record.add(f"{name} norm", clip(list(model.parameters()), 1.0))
        trainer.optimizer.step()
        trainer.scheduler.step()
        mean = torch.stack(losses).sum()
        dist.all_reduce(mean)
        record.add(f"{name} loss", mean)
        trainer.step += 1


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record = Record(args.out, dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    folder: Path = args.out / "checkpoint"

    first = build(mesh, args.steps)
    train(first, args.steps // 2, record, "first half")
    dcp.save({"trainer": first}, checkpoint_id=folder)
    train(first, args.steps, record, "second half")

    second = build(mesh, args.steps)
    dcp.load({"trainer": second}, checkpoint_id=folder)
    train(second, args.steps, record, "second half again")
    whole = get_model_state_dict(second.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, args.out / "model.pt")
    record.write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
