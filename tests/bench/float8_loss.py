"""What gathers in float8 cost a small GPT: its loss with and without them, on two daemons of this machine, each with one rank.

The model, its data and the loop are those of tests/python/ranks/nodes_float8_scenarios.py. One line for each seed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "client" / "python" / "src")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default=str(ROOT / "build" / "dev" / "bin"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    asked = parser.parse_args()
    os.environ.setdefault("SHARDD_DAEMON", f"{asked.bin}/shardd")
    from node_daemons import nodes, run_on_nodes
    from ranks import nodes_float8_scenarios

    with nodes() as over:
        for seed in range(asked.seeds):
            last = []
            for float8 in (False, True):
                losses = run_on_nodes(
                    over, nodes_float8_scenarios.gpt, asked.steps, float8, asked.width, asked.layers, seed,
                    local=1, limit_s=900)[0]  # fmt: skip
                last.append(sum(losses[-20:]) / 20)
            print(
                f"seed {seed}, {asked.steps} steps: mean loss of the last 20 steps {last[0]:.4f} in bf16, {last[1]:.4f} with float8 gathers "
                f"({100 * (last[1] / last[0] - 1):+.2f} %)",
                flush=True,
            )


if __name__ == "__main__":
    main()
