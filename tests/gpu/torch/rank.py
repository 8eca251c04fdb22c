"""One rank: runs the cases that it is told, one after the other, and writes what they gave as JSON.

python rank.py DEVICE FOLDER CASE...     with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and SHARDD_ADDRESS
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist


def main() -> None:
    faulthandler.enable()
    device, folder, *names = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(0)  # ranks share one GPU, which NCCL does not do
    alone = os.environ["WORLD_SIZE"] == "1"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" and alone else "gloo")
    import trainer_cases  # noqa: F401  (adds its own)
    from cases import CASES

    results = {}
    for name in names:
        try:
            results[name] = CASES[name](device)
        except BaseException:
            results[name] = {"error": traceback.format_exc()}
        gc.collect()
        with open(f"{folder}/rank{dist.get_rank()}.json", "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
