"""Programs of two models, or of two backwards: GANs, gradient penalties, spectral norms, teachers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

from training.programs.nets import Layer, Net
from training.programs.script import Script, data

__all__ = ["distillation", "gan", "gradient_penalty", "spectral"]


def gradient_penalty(script: Script) -> list[Any]:
    """A critic whose gradient by its input has norm 1: the backward goes through a backward."""
    critic = script.shard(Net(outputs=1), Layer)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.05)
    start, kept = script.resume(critic)
    seen: list[Any] = kept or []
    for step in range(start, 4):
        real, fake = data(step, 4, 5), data(step + 50, 4, 5)
        between = torch.lerp(real, fake, 0.3).requires_grad_()
        scores = critic(between)
        (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        # Alone it is a graph of gradients that no output of a forward leads to.
        loss = penalty if step == 1 else critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        seen += [loss.item(), slope.detach()]
        script.ride(seen)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def spectral(script: Script) -> list[Any]:
    """Weights are computed from parameters and buffers at each use, and are cached for two."""
    net = Net()
    spectral_norm(net.layers[0].linear)
    spectral_norm(net.last)
    model = script.shard(net, Layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    start, kept = script.resume(model)
    seen: list[Any] = []
    if kept is not None:
        seen, buffers = kept
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])
    for step in range(start, 4):
        model.train(step != 2)
        with torch.nn.utils.parametrize.cached():
            loss = model(data(step, 4, 5)).square().mean() + model(data(step + 9, 4, 5)).mean()
            loss.backward()
        seen.append(loss.item())
        script.ride((seen, {name: buffer.clone() for name, buffer in net.named_buffers()}))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def gan(script: Script) -> list[Any]:
    """Two models and two optimizers: one is trained through the other, which gets gradients that it drops.

    A restarted program may find that one of them is a step ahead."""
    generator = script.shard(Net(inputs=2, outputs=5), Layer)
    critic = script.shard(Net(outputs=1, seed=1), Layer)
    of_generator = torch.optim.AdamW(generator.parameters(), lr=0.02)
    of_critic = torch.optim.AdamW(critic.parameters(), lr=0.02)
    bce = F.binary_cross_entropy_with_logits
    (start, kept), (criticised, ahead) = script.resume(generator), script.resume(critic)
    seen: list[Any] = (ahead if criticised > start else kept) or []
    for step in range(start, 4):
        fake = generator(data(step, 4, 2))
        if step >= criticised:
            of_critic.zero_grad()
            right, wrong = torch.ones(4, 1), torch.zeros(4, 1)
            loss = bce(critic(data(step + 50, 4, 5)), right) + bce(critic(fake.detach()), wrong)
            loss.backward()
            seen.append(loss.item())
            script.ride(seen)
            of_critic.step()
        of_generator.zero_grad()
        fooled = bce(critic(fake), torch.ones(4, 1))
        fooled.backward()
        seen.append(fooled.item())
        script.ride(seen)
        of_generator.step()
    return seen


def distillation(script: Script) -> list[Any]:
    """A frozen teacher, sharded too, and a student that is judged through it once more."""
    teacher = script.shard(Net(seed=2).requires_grad_(False).eval(), Layer)
    student = script.shard(Net(), Layer)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.05)
    start, kept = script.resume(student)
    seen: list[Any] = kept or []
    for step in range(start, 4):
        x = data(step, 4, 5)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            want = teacher(x).softmax(-1)
        loss = (
            F.kl_div(student(x).log_softmax(-1), want.clone(), reduction="batchmean")
            + 0.1 * (teacher(student(x)[:, [0, 1, 2, 0, 1]])).square().mean()
        )
        loss.backward()
        seen.append(loss.item())
        script.ride(seen)
        optimizer.step()
        optimizer.zero_grad()
    return seen
