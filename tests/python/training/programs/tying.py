"""An encoder and a decoder that share one embedding and head, and a layer that is used twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training.programs.script import Script
from training.programs.text import WORDS, tokens

__all__ = ["weight_tying"]

_WIDTH = 12


class Coder(nn.Module):
    """A layer of the encoder, or of the decoder, which attends to what the encoder gives."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(_WIDTH, 2, bias=False, batch_first=True)
        self.other = nn.MultiheadAttention(_WIDTH, 2, bias=False, batch_first=True) if crosses else None
        self.norm = nn.LayerNorm(_WIDTH)
        self.feed = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.own(x, x, x, need_weights=False)[0]
        if self.other is not None:
            assert memory is not None
            x = x + self.other(x, memory, memory, need_weights=False)[0]
        return x + self.feed(self.norm(x)).relu()  # type: ignore[no-any-return]


class Translator(nn.Module):
    """One matrix is the embedding of both sides and the head; the decoder's second layer is its first, once more."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.shared = nn.Embedding(WORDS, _WIDTH, padding_idx=0)
        self.encode = nn.ModuleDict({"embed": nn.Embedding(WORDS, _WIDTH), "layer": Coder(False)})
        self.decode = nn.ModuleDict({"embed": nn.Embedding(WORDS, _WIDTH), "layer": Coder(True)})
        self.decode["again"] = self.decode["layer"]
        self.head = nn.Linear(_WIDTH, WORDS, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        for module in (self.encode["embed"], self.decode["embed"], self.head):
            module.weight = self.shared.weight

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.encode["layer"](self.encode["embed"](source))
        x = self.decode["layer"](self.decode["embed"](target), memory=memory)
        return self.head(self.decode["again"](x, memory=memory))  # type: ignore[no-any-return]


def weight_tying(script: Script) -> list[Any]:
    """A parameter under four names and a layer under two; the state dict has all, and loads into a bare model."""
    model = script.shard(Translator(), Coder)
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    start, kept = script.resume(model)
    seen: list[Any] = kept or []
    for step in range(start, 5):
        source, target = tokens(step, 5), tokens(step + 50, 7)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)
        loss.backward()
        seen.append(loss.item())
        script.ride(seen)
        optimizer.step()
        optimizer.zero_grad()
    whole = script.state_dict(model)
    names = ["shared.weight", "encode.embed.weight", "decode.embed.weight", "head.weight"]
    assert all(torch.equal(whole[names[0]], whole[name]) for name in names)
    bare = Translator()
    bare.load_state_dict(whole)
    bare.eval()
    with torch.no_grad():
        seen = [*seen, sorted(whole), bare(tokens(0, 5, 2), tokens(1, 4, 2))]
    return [*seen, *script.parameters(model)]
