#!/usr/bin/env python3
"""Trains the character model, is killed, and goes on where it was: nothing is lost, nothing is loaded.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node=2 --max-restarts=3 resume.py --kill-at=20

TORCH_DISABLE_SHARE_RDZV_TCP_STORE keeps restarted workers from finding the dead ones' gloo addresses.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from model import arguments, batch, build, load_text
from shardd.torch import fully_shard, resume, ride
from shardd.torch.optim import AdamW

STARTED = time.time()  # the interpreter runs and torch is imported
MARK = f"/dev/shm/shardd-example-{os.getppid()}"  # when a worker was killed


def kill_once(rank: int) -> None:
    if rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        with open(MARK, "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def say_what_it_cost(rank: int, step_took: float) -> None:
    if rank == 0 and os.path.exists(MARK) and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        with open(MARK) as file:
            killed = float(file.read())
        os.unlink(MARK)
        print(
            f"SIGKILL to next finished step: {time.time() - killed:.2f} s; {STARTED - killed:.2f} s of it are torchrun's "
            f"restart, the start of Python and the import of torch, {step_took:.2f} s the step itself",
            flush=True,
        )


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build(args)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # Its state is in the daemon, and with torch's own optimizers in the daemon's memory.
    kind = torch.optim.AdamW if args.stock else AdamW
    optimizer = kind(model.parameters(), lr=args.lr, foreach=True)

    first, state = resume()  # parameters and optimizer state are there already
    characters = state["characters"] if state else 0
    if first:
        print(f"rank {rank}: resumed at step {first}, after {characters} characters", flush=True)
    text = load_text()
    for step in range(first, args.steps):
        began = time.time()
        loss = model(*batch(text, args.batch, args.context, rank, step))
        if step == args.kill_at:
            kill_once(rank)
        loss.backward()
        characters += args.batch * args.context
        ride({"characters": characters})  # committed with the step
        optimizer.step()
        optimizer.zero_grad()
        say_what_it_cost(rank, time.time() - began)
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
