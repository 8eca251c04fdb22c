"""torchao's way: weights that are stored in fp32 and gathered in float8 (`enable_fsdp_float8_all_gather`), or, with --qlora, frozen
NF4 weights under LoRA adapters. Its subclasses say themselves how FSDP2 gathers them. No download."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp
from torchao.quantization import to_nf4

from common import LENGTH, VOCABULARY, Record, Sentences, parser

WIDTH = 64
ACCUMULATE = 2


class LoRALinear(nn.Module):
    """A frozen weight in NF4, and an adapter, as torchtune's QLoRA has them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = nn.init.kaiming_uniform_(torch.empty(outputs, inputs))
        self.weight = nn.Parameter(to_nf4(weight, 32, 16), requires_grad=False)
        self.a, self.b = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)
        nn.init.normal_(self.b.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + 2 * self.b(self.a(x))


class Block(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def made(qlora: bool) -> nn.Module:
    torch.manual_seed(7)
    linear: Any = LoRALinear if qlora else nn.Linear
    blocks = [Block(linear) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    if qlora:
        for module in (model[0], model[-1]):
            module.requires_grad_(False)
    else:
        # CPUs multiply no float8: emulated, which rounds alike.
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "5")
    for block in model[1:4]:
        fully_shard(block)
    fully_shard(model)
    return model


class Run:
    def __init__(self, qlora: bool, ahead: bool) -> None:
        self.model, self.ahead = made(qlora), ahead
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=2e-3)

    def train(self, steps: range, record: Record, name: str) -> None:
        data = Sentences(1024).tokens.unflatten(0, (-1, dist.get_world_size(), 4))
        model: Any = self.model
        for step in steps:
            for number in range(ACCUMULATE):
                model.set_requires_gradient_sync(number == ACCUMULATE - 1)
                batch = data[step * ACCUMULATE + number, dist.get_rank()]
                logits = model(batch)[:, : LENGTH - 1].flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten()) / ACCUMULATE
                loss.backward()
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                record.add(f"{name} loss", shown)
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            record.add(f"{name} norm", norm.full_tensor())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ahead:
                precompute_float8_dynamic_scale_for_fsdp(model)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter in one process, as numbers: quantized ones as what they stand for."""
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor()
        whole = whole.get_original_weight() if hasattr(whole, "get_original_weight") else whole
        found[name] = getattr(whole, "_tensor", whole).detach().clone()
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--qlora", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    record = Record(args.out, dist.get_rank())
    half = args.steps // 2
    of_trained = StateDictOptions(ignore_frozen_params=args.qlora)
    for ahead in (False,) if args.qlora else (False, True):
        name = "QLoRA" if args.qlora else "float8, scales ahead" if ahead else "float8"
        first = Run(args.qlora, ahead)
        first.train(range(half), record, f"{name}, first half")
        model, optimizer = get_state_dict(first.model, first.optimizer, options=of_trained)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=args.out / name)
        first.train(range(half, args.steps), record, f"{name}, second half")
        whole = _whole(first.model)
        full = get_model_state_dict(
            first.model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=args.qlora)
        )
        if dist.get_rank() == 0:
            torch.save(whole, args.out / f"{name}.pt")
            full = {key: getattr(value, "_tensor", value) for key, value in full.items()}
            torch.save(full, args.out / f"{name} full.pt")
        dist.barrier()
        second = Run(args.qlora, ahead)
        model, optimizer = get_state_dict(second.model, second.optimizer, options=of_trained)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=args.out / name)
        strict = StateDictOptions(strict=not args.qlora, ignore_frozen_params=args.qlora)
        set_state_dict(
            second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=strict
        )
        second.train(range(half, args.steps), record, f"{name}, second half again")
    record.write()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
