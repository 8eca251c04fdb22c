#!/usr/bin/env python3
"""Trains the character model on every rank; goes on where it was when a worker is killed.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=2 --max-restarts=3 train.py --kill-at=20

With --impl=torch it is the same program on torch's own fully_shard; two imports are the whole difference.
TORCH_DISABLE_SHARE_RDZV_TCP_STORE keeps restarted workers from finding the dead ones' gloo addresses.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist

from model import Gpt, batch, load_text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=("shardd", "torch"), default="shardd")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="per rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--kill-at", type=int, default=-1, help="rank 1 kills itself once, in the middle of this step")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if args.impl == "shardd":
        from shardd.torch import fully_shard, resume, ride
        from shardd.torch.optim import AdamW
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.optim import AdamW

    torch.manual_seed(1)
    model = Gpt(args.width, args.layers, args.heads, args.context)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=args.lr)

    first, seen = 0, {}
    if args.impl == "shardd":
        first, state = resume()  # parameters and optimizer state are there already
        seen = state or {}
        if first:
            print(f"rank {rank}: resumed at step {first}, nothing lost", flush=True)
    text = load_text()
    mark = f"/dev/shm/shardd-example-{os.getppid()}"  # when the worker was killed, for the time that it costs
    for step in range(first, args.steps):
        loss = model(*batch(text, args.batch, args.context, rank, step))
        loss.backward()
        if step == args.kill_at and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            with open(mark, "w") as file:
                file.write(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if args.impl == "shardd":
            seen["characters"] = seen.get("characters", 0) + args.batch * args.context
            ride(seen)  # committed with the step
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1 or step == first):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
        if rank == 0 and os.path.exists(mark):
            with open(mark) as file:
                seconds = time.time() - float(file.read())
            os.unlink(mark)
            print(
                f"SIGKILL to next finished step: {seconds:.2f} s, imports and restart by torchrun included", flush=True
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
