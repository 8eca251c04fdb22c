"""Training scripts as people write them, each a function of the two names that a program imports: how to shard, and AdamW."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from state_dicts.wrapper_state_cases import face, quiet

Shard = Callable[[nn.Module], Any]


class Layer(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, inputs: int = 5, outputs: int = 3, depth: int = 2, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first = nn.Linear(inputs, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.last = nn.Linear(6, outputs)
        self.skip: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            if number not in self.skip:
                x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


def _data(step: int, *shape: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradient_penalty(shard: Shard, adamw: Any) -> list[Any]:
    """A critic whose gradient by its input has norm 1: the backward goes through a backward."""
    critic = shard(Net(outputs=1))
    optimizer = adamw(critic.parameters(), lr=0.05)
    seen = []
    for step in range(3):
        real, fake = _data(step, 4, 5), _data(step + 50, 4, 5)
        between = torch.lerp(real, fake, 0.3).requires_grad_()
        scores = critic(between)
        (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        # Alone it is a graph of gradients that no output of a forward leads to.
        loss = penalty if step == 1 else critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), slope.detach()]
    return seen


def stochastic_depth(shard: Shard, adamw: Any) -> list[Any]:
    """Whole layers are left out at random, alike on all ranks, and sometimes all of them."""
    net = Net(depth=4)
    model = shard(net)
    optimizer = adamw(model.parameters(), lr=0.05, weight_decay=0.1)
    dice = random.Random(3)
    seen = []
    for step in range(6):
        net.skip = {number for number in range(4) if step == 3 or dice.random() < 0.5}
        loss = model(_data(step, 4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    net.skip = set()
    model.eval()
    with torch.no_grad():
        return [*seen, model(_data(99, 4, 5))]


def spectral(shard: Shard, adamw: Any) -> list[Any]:
    """Weights are computed from parameters and buffers at each use, and are cached for two."""
    net = Net()
    spectral_norm(net.layers[0].linear)
    spectral_norm(net.last)
    model = shard(net)
    optimizer = adamw(model.parameters(), lr=0.05)
    seen = []
    for step in range(4):
        model.train(step != 2)
        with torch.nn.utils.parametrize.cached():
            loss = model(_data(step, 4, 5)).square().mean() + model(_data(step + 9, 4, 5)).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def gan(shard: Shard, adamw: Any) -> list[Any]:
    """Two models and two optimizers: one is trained through the other, which gets gradients that it drops."""
    generator, critic = shard(Net(inputs=2, outputs=5)), shard(Net(outputs=1, seed=1))
    of_generator, of_critic = adamw(generator.parameters(), lr=0.02), adamw(critic.parameters(), lr=0.02)
    bce = F.binary_cross_entropy_with_logits
    seen = []
    for step in range(4):
        fake = generator(_data(step, 4, 2))
        of_critic.zero_grad()
        right, wrong = torch.ones(4, 1), torch.zeros(4, 1)
        loss = bce(critic(_data(step + 50, 4, 5)), right) + bce(critic(fake.detach()), wrong)
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        fooled = bce(critic(fake), right)
        fooled.backward()
        of_generator.step()
        seen += [loss.item(), fooled.item()]
    return seen


def moving_average(shard: Shard, adamw: Any) -> list[Any]:
    """A second model follows the first, is evaluated, and takes its place in the end."""
    net = Net()
    average = shard(copy.deepcopy(net).requires_grad_(False))
    model = shard(net)
    optimizer = adamw(model.parameters(), lr=0.05)
    seen = []
    for step in range(4):
        loss = model(_data(step, 4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast, 0.2)
            seen += [loss.item(), average(_data(step + 50, 4, 5))]
        getattr(average, "reshard", lambda: None)()  # torch's root stays unsharded after a forward
    model.load_state_dict(average.state_dict())
    with torch.no_grad():
        return [*seen, model(_data(7, 4, 5))]


def distillation(shard: Shard, adamw: Any) -> list[Any]:
    """A frozen teacher, sharded too, and a head of the student's that is unfrozen later."""
    teacher, student = shard(Net(seed=2).requires_grad_(False).eval()), shard(Net())
    optimizer = adamw(student.parameters(), lr=0.05)
    seen = []
    for step in range(4):
        x = _data(step, 4, 5)
        with torch.inference_mode() if step % 2 else torch.no_grad():
            want = teacher(x).softmax(-1)
        loss = (
            F.kl_div(student(x).log_softmax(-1), want.clone(), reduction="batchmean")
            + 0.1 * (teacher(student(x)[:, [0, 1, 2, 0, 1]])).square().mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def curriculum(shard: Shard, adamw: Any) -> list[Any]:
    """Longer inputs from step to step, other lengths on other ranks, and batches that grow by accumulation; the rate follows."""
    model = shard(Net())
    optimizer = adamw(model.parameters(), lr=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4, cycle_momentum=False)
    seen = []
    for step in range(4):
        for micro in range(1 + step):
            x = _data(10 * step + micro, 2, 1 + 2 * step + dist.get_rank(), 5)
            loss = model(x).square().mean() / (1 + step)
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    return seen


def early_stopping(shard: Shard, adamw: Any) -> list[Any]:
    """One rank sees that it gets worse and tells the others; all go back to the best weights and optimizer state."""
    model = shard(Net())
    optimizer = adamw(model.parameters(), lr=0.4)
    best, kept, seen = float("inf"), None, []
    for step in range(12):
        loss = model(_data(step, 4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            score = model(_data(0, 8, 5, rank=7)).square().mean()
        model.train()
        seen.append(score.item())
        # Rank 1 decides, by what it alone knows.
        said = torch.tensor([float(score < best), float(step > 3 and score > 1.5 * best)])
        dist.broadcast(said, src=1)
        if said[0]:
            best = score.item()
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if said[1]:
            break
    assert kept is not None
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    for step in (20, 21):
        loss = model(_data(step, 4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return [*seen, len(seen)]


def rollouts(shard: Shard, adamw: Any) -> list[Any]:
    """A policy plays under no_grad, in eval mode, several forwards after another, and learns from what it did; twice a rollout."""
    policy = shard(Net())
    optimizer = adamw(policy.parameters(), lr=0.05)
    dice = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(3):
        policy.eval()
        states, actions, old, rewards = [_data(step, 4, 5)], [], [], []
        with torch.no_grad():
            for _ in range(3):
                chances = policy(states[-1]).softmax(-1)
                actions.append(torch.multinomial(chances, 1, generator=dice))
                old.append(chances.gather(1, actions[-1]).log())
                states.append(states[-1].roll(1, 1) + actions[-1])
                rewards.append(states[-1].tanh().mean(1, keepdim=True))
        policy.train()
        for _ in range(2):
            log = policy(torch.cat(states[:-1])).log_softmax(-1).gather(1, torch.cat(actions))
            ratio = (log - torch.cat(old)).exp()
            gain = torch.min(ratio * torch.cat(rewards), ratio.clamp(0.9, 1.1) * torch.cat(rewards))
            (-gain.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [gain.mean().item(), torch.cat(actions).flatten()]
    return seen


PROGRAMS = {
    f.__name__: f
    for f in (
        gradient_penalty, stochastic_depth, spectral, gan, moving_average, distillation, curriculum, early_stopping, rollouts,
    )
}  # fmt: skip


TORCH_CANNOT = {
    ("gradient_penalty", "fully_shard"),  # its second backward reads parameters that are freed
    ("gradient_penalty", "wrapper"),
    ("moving_average", "wrapper"),  # its root stays unsharded after an evaluation, and what is written then is lost
}


def _shard(impl: str, form: str) -> Shard:
    if form == "wrapper":
        policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy({Layer})
        return lambda net: face(impl)(net, use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=policy)
    if impl == "plain":
        return lambda net: net
    import shardd.torch

    fully_shard: Any = shardd.torch.fully_shard if impl == "shardd" else torch.distributed.fsdp.fully_shard

    def apply(net: nn.Module) -> Any:
        for layer in net.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        return fully_shard(net)

    return apply


def _averaging(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Of models that are not sharded: the mean of the ranks' gradients."""
    optimizer = torch.optim.AdamW(params, **options)

    def average(*_: Any) -> None:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            found = torch.tensor(float(param.grad is not None))
            dist.all_reduce(found)
            if found:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()

    optimizer.register_step_pre_hook(average)
    return optimizer


def all_forms(name: str) -> dict[str, Any]:
    """What the program has seen without sharding, on torch's forms, and on shardd's with the daemon's optimizer and torch's."""
    from shardd.torch import optim

    out: dict[str, Any] = {}
    with quiet():
        out["plain"] = _run(name, _shard("plain", ""), _averaging)
        for form in ("fully_shard", "wrapper"):
            if (name, form) not in TORCH_CANNOT:
                out[f"torch's {form}"] = _run(name, _shard("torch", form), torch.optim.AdamW)
            adamw: Any = optim.AdamW if form == "fully_shard" else torch.optim.AdamW
            out[form] = _run(name, _shard("shardd", form), adamw)
    return out


def _run(name: str, shard: Shard, adamw: Any) -> list[Any]:
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in PROGRAMS[name](shard, adamw)]
