#!/usr/bin/env python3
"""Trains the character model on several nodes; nodes.sh starts two of them on this machine.

Parameters are cut over the ranks of a node and replicated over nodes, or with --cut over the ranks of all nodes; the daemons add
the nodes' gradients. A worker that is killed makes torchrun restart all of them, on all nodes, and they go on at the last
committed step.
"""

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from model import arguments, batch, build, load_text
from shardd.torch import clip_grad_norm_, fully_shard, resume, ride
from shardd.torch.optim import AdamW


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    if args.cut:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:  # a row for each node: what torch calls hybrid sharding
        mesh = init_device_mesh("cpu", (dist.get_world_size() // local, local), mesh_dim_names=("replicate", "shard"))
    model = build(args)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=args.lr)

    first, state = resume()
    characters = state["characters"] if state else 0
    if first:
        print(f"rank {rank}: resumed at step {first}, after {characters} characters", flush=True)
    text = load_text()
    for step in range(first, args.steps):
        loss = model(*batch(text, args.batch, args.context, rank, step))
        if step == args.kill_at and not first and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        characters += args.batch * args.context
        ride({"characters": characters})
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
