"""Loops that are not a batch, a backward and a step each: lengths that change, layers left out, rollouts."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from training.programs.nets import Layer, Net
from training.programs.script import Script, data

__all__ = ["curriculum", "rollouts", "stochastic_depth"]


def stochastic_depth(script: Script) -> list[Any]:
    """Whole layers are left out at random, alike on all ranks, and sometimes all of them."""
    net = Net(depth=4)
    model = script.shard(net, Layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    dice = random.Random(3)
    start, kept = script.resume(model)
    seen: list[Any] = []
    if kept is not None:
        seen, state = kept
        dice.setstate(state)
    for step in range(start, 6):
        net.skip = {number for number in range(4) if step == 3 or dice.random() < 0.5}
        loss = model(data(step, 4, 5)).square().mean()
        loss.backward()
        seen.append(loss.item())
        script.ride((seen, dice.getstate()))
        optimizer.step()
        optimizer.zero_grad()
    net.skip = set()
    model.eval()
    with torch.no_grad():
        return [*seen, model(data(99, 4, 5))]


def curriculum(script: Script) -> list[Any]:
    """Longer inputs from step to step, other lengths on other ranks, and batches that grow by accumulation; the rate follows."""
    model = script.shard(Net(), Layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5, cycle_momentum=True)
    start, kept = script.resume(model)
    seen: list[Any] = kept or []
    for _ in range(start):
        rate.step()
    for step in range(start, 4):
        for micro in range(1 + step):
            x = data(10 * step + micro, 2, 1 + 2 * step + dist.get_rank(), 5)
            loss = model(x).square().mean() / (1 + step)
            loss.backward()
            seen.append(loss.item())
        script.ride(seen)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    return [*seen, optimizer.param_groups[0]["betas"]]


def rollouts(script: Script) -> list[Any]:
    """A policy plays under no_grad, in eval mode, several forwards after another, and learns from what it did; twice a rollout.

    A step is half of a rollout, so a restarted program gets what it played from what it rode with."""
    policy = script.shard(Net(), Layer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05)
    dice = torch.Generator().manual_seed(dist.get_rank())
    start, kept = script.resume(policy)
    seen: list[Any] = []
    if kept is not None:
        seen, played, state = kept
        dice.set_state(state)
    for step in range(start, 6):
        if step % 2 == 0:
            policy.eval()
            states, actions, old, rewards = [data(step // 2, 4, 5)], [], [], []
            with torch.no_grad():
                for _ in range(3):
                    chances = policy(states[-1]).softmax(-1)
                    actions.append(torch.multinomial(chances, 1, generator=dice))
                    old.append(chances.gather(1, actions[-1]).log())
                    states.append(states[-1].roll(1, 1) + actions[-1])
                    rewards.append(states[-1].tanh().mean(1, keepdim=True))
            policy.train()
            played = torch.cat(states[:-1]), torch.cat(actions), torch.cat(old), torch.cat(rewards)
        inputs, done, before, reward = played
        ratio = (policy(inputs).log_softmax(-1).gather(1, done) - before).exp()
        gain = torch.min(ratio * reward, ratio.clamp(0.9, 1.1) * reward)
        (-gain.mean()).backward()
        seen += [gain.mean().item(), done.flatten()]
        script.ride((seen, played, dice.get_state()))
        optimizer.step()
        optimizer.zero_grad()
    return seen
