#!/usr/bin/env python3
"""Trains the character model: torchrun --standalone --nproc-per-node=2 FILE. `diff train_pytorch.py train.py`: one line."""

import torch
import torch.distributed as dist

from model import arguments, batch, build, load_text

# isort: split
from shardd.torch import fully_shard


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(args)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=True)
    text = load_text()
    for step in range(args.steps):
        loss = model(*batch(text, args.batch, args.context, rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
