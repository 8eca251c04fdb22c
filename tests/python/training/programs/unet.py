"""A U-Net whose stages hand over skips, as diffusion models are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from training.programs.script import Script, data

__all__ = ["unet"]


class Convolved(nn.Module):
    """Two convolutions with norms, shifted by the time's embedding, as diffusion models have them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs, momentum=0.2)
        self.time = nn.Linear(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(2, outputs)

    def forward(self, x: torch.Tensor, *, time: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.first(x)) + self.time(time)[:, :, None, None])
        return F.silu(self.norm2(self.second(x)))


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolved = Convolved(inputs, outputs)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        skip = self.convolved(x, time=time)
        return F.max_pool2d(skip, 2), skip


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(inputs, outputs, 2, 2)
        self.convolved = Convolved(2 * outputs, outputs)

    def forward(self, x: torch.Tensor, skip: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.convolved(torch.cat([self.widen(x), skip], 1), time=time)  # type: ignore[no-any-return]


class UNet(nn.Module):
    frequencies: torch.Tensor

    def __init__(self) -> None:
        torch.manual_seed(6)
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))
        self.down = nn.ModuleList([Down(2, 4), Down(4, 6)])
        self.middle = Convolved(6, 6)
        self.up = nn.ModuleList([Up(6, 6), Up(6, 4)])
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> dict[str, torch.Tensor]:
        angles = time[:, None] * self.frequencies
        embedded = torch.cat([angles.sin(), angles.cos()], 1)
        skips = []
        for stage in self.down:
            x, skip = stage(x, embedded)
            skips.append(skip)
        x = self.middle(x, time=embedded)
        for stage in self.up:
            x = stage(x, skips.pop(), embedded)
        return {"sample": self.out(x)}


def unet(script: Script) -> list[Any]:
    """A diffusion model learns the noise; outputs of its stages are watched by hooks; running statistics of each rank."""
    net = UNet()
    model = script.shard(net, Down, Up, Convolved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    heights: list[float] = []
    for stage in net.up:
        stage.register_forward_hook(lambda m, args, out: heights.append(out.detach().abs().max().item()))
    start, kept = script.resume(model)
    seen: list[Any] = []
    if kept is not None:
        seen, buffers = kept
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])
    for step in range(start, 5):
        time = (data(step + 70, 2).abs() * 3).round()
        noise = data(step, 2, 2, 8, 8)
        noisy = torch.lerp(torch.ones_like(noise), noise, 0.1 + time[:, None, None, None] / 20)
        loss = F.mse_loss(model(noisy, time=time)["sample"], noise)
        loss.backward()
        seen += [loss.item(), *heights]
        heights.clear()
        script.ride((seen, {name: buffer.clone() for name, buffer in net.named_buffers()}))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.inference_mode():
        sample = model(data(99, 2, 2, 8, 8), time=torch.ones(2))["sample"].clone()
    return [*seen, sample, *(b.clone() for b in net.buffers()), *script.parameters(model)]
