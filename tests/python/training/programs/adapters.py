"""Fine-tuning of a frozen base: LoRA, and LoRA over a base of four bits that travels as bytes of another dtype."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.programs.script import Script, data

__all__ = ["lora", "qlora"]

_WIDTH = 8


class Lora(nn.Module):
    def __init__(self, base: nn.Module, rank: int = 2, alpha: float = 4.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, alpha / rank
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A, self.lora_B = nn.Linear(_WIDTH, rank, bias=False), nn.Linear(rank, _WIDTH, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.q_proj, self.v_proj = (nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        self.o_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.o_proj(torch.tanh(self.q_proj(y)) * self.v_proj(y))  # type: ignore[no-any-return]


class Base(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(8)
        super().__init__()
        self.embed = nn.Embedding(11, _WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.score = nn.Linear(_WIDTH, 3)
        self.checkpoints = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpoints and self.training else layer(x)
        return self.score(x.mean(1))  # type: ignore[no-any-return]


def _adapted(net: Any) -> Any:
    """PEFT's pattern: all is frozen but adapters and the new head."""
    net.requires_grad_(False)
    for layer in net.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer, name, Lora(getattr(layer, name)))
    net.score.requires_grad_(True)
    return net


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = (data(step, 4, 6).abs() * 9).long() % 11
    return tokens, tokens.sum(1) % 3


def _tune(script: Script, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[Any]:
    start, kept = script.resume(model)
    seen: list[Any] = kept or []
    for step in range(start, steps):
        torch.manual_seed(100 * step + dist.get_rank())  # of dropout
        model.train()
        tokens, labels = _batch(step)
        loss = F.cross_entropy(model(tokens).float(), labels)
        loss.backward()
        seen += [loss.item(), script.clip(model, 0.5)]
        script.ride(seen)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def lora(script: Script) -> list[Any]:
    """Reentrant checkpoints over inputs that a hook makes require gradients; adapters alone are saved, then merged."""
    net = _adapted(Base())
    net.checkpoints = True
    net.embed.register_forward_hook(lambda m, args, out: out.requires_grad_(True))  # enable_input_require_grads
    model = script.shard(net, Block)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2, weight_decay=0.01)
    seen = _tune(script, model, optimizer, 5)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    whole = script.state_dict(model)
    adapters = {n: v for n, v in whole.items() if "lora_" in n or n.startswith("score")}
    merged = Base()
    state = {n.replace("base_layer.", ""): v for n, v in whole.items() if "lora_" not in n}
    for name in [n for n in adapters if n.endswith("lora_A.weight")]:
        key = name.removesuffix("lora_A.weight")
        state[f"{key}weight"] += 2.0 * adapters[f"{key}lora_B.weight"] @ adapters[name]
    merged.load_state_dict(state)
    merged.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(_batch(0)[0]), merged(_batch(0)[0]))
    return [*seen, sorted(adapters), *adapters.values(), *script.parameters(model)]


class Linear4bit(nn.Module):
    """bitsandbytes' ``quant_storage``: two numbers in each byte, which stand in a frozen parameter of ``storage``."""

    absmax: torch.Tensor

    def __init__(self, linear: nn.Linear, storage: torch.dtype) -> None:
        super().__init__()
        weight = linear.weight.detach()
        absmax = weight.abs().amax(1, keepdim=True)
        codes = ((weight / absmax + 1) * 7.5).round().to(torch.uint8).view(-1, 2)
        packed = (codes[:, 0] << 4 | codes[:, 1]).view(storage)
        self.weight = nn.Parameter(packed.view(-1, 1), requires_grad=False)
        self.register_buffer("absmax", absmax)
        self.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.weight.detach().contiguous().view(torch.uint8).flatten()
        codes = torch.stack([packed >> 4, packed & 15], 1).view(_WIDTH, _WIDTH)
        weight = ((codes.float() / 7.5 - 1) * self.absmax.float()).to(x.dtype)
        return F.linear(x, weight, self.bias.to(x.dtype))


def qlora(script: Script) -> list[Any]:
    """The base in four bits, as numbers of the adapters' dtype, among which are NaNs: no bit of them may change."""
    storage = torch.float32 if script.form == "fully_shard" else torch.bfloat16
    net = Base()
    for layer in net.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer, name, Linear4bit(getattr(layer, name), storage))
    with torch.no_grad():
        first = net.layers[0].q_proj.weight.view(torch.uint8).view(-1)
        first[:8] = torch.tensor([255, 255, 255, 255, 1, 0, 128, 127])  # a NaN of many, and denormals or another NaN
    base = [m.weight.detach().clone() for m in net.modules() if isinstance(m, Linear4bit)]
    model = script.shard(_adapted(net).to(storage), Block)
    trained = [p for p in model.parameters() if p.requires_grad]
    seen = _tune(script, model, torch.optim.AdamW(trained, lr=5e-2), 5)
    whole = script.state_dict(model)
    kept = [v for n, v in whole.items() if n.endswith("base_layer.weight")]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(base, kept, strict=True))
    return [*seen, *(p for p in script.parameters(model) if not p.isnan().any())]
