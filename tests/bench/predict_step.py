#!/usr/bin/env python3
"""What `shardctl predict` says of fleets that nobody here has, and how far it is from a step that was measured.

    python3 tests/bench/predict_step.py --bin build/dev/bin --fleets --svg fleets.svg
    python3 tests/bench/torch_step.py --sizes S M --implementations floor shardd sharddn --json step.json
    python3 tests/bench/predict_step.py --bin build/dev/bin --check step.json

Fleets: models as large as Llama 3's (fp32 shards, bf16 in forward and backward, AdamW, every block recomputed in backward) at 8 to
16,384 GPUs, 8 on a node. The machine is described below, and is none that was measured. `cut`: over all nodes (FULL_SHARD);
`replicas`: cut within each node, as far as a GPU holds that.
Check: torch_step's models, with computation as its floor has it; predicted and measured steps, and their difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# layers, width, width of the feed-forward, heads, of these for keys and values
LLAMAS = {"8B": (32, 4096, 14336, 32, 8), "70B": (80, 8192, 28672, 64, 8), "405B": (126, 16384, 53248, 128, 8)}
VOCABULARY, SEQUENCE = 128256, 8192
GPUS = (8, 64, 512, 4096, 16384)
GPUS_PER_NODE = 8
GPU_MIB = 80 * 1024
# An H100 of a node with eight, at rates that programs reach: half of the data sheet's bf16 products, 400 Gbit/s per GPU.
H100 = {"name": "H100", "flopsPerS": 5e14, "memoryBytesPerS": 2.5e12, "deviceLinkBytesPerS": 3.5e11, "nodeLinkBytesPerS": 4e10,
        "transferS": 2e-5, "otherNodeS": 2e-6, "requestS": 2e-5, "stepS": 1e-3}  # fmt: skip

Shapes = dict[str, list[int]]


def spec_of(root: Shapes, blocks: list[tuple[str, Shapes]], **config: Any) -> dict[str, Any]:
    """A shardd.v1.JobSpec whose parameter groups are the root and the blocks."""

    def parameters(shapes: Shapes) -> list[dict[str, Any]]:
        return [
            {"name": name, "shape": shape, "dtype": "DTYPE_FLOAT32", "requiresGrad": True}
            for name, shape in shapes.items()
        ]

    modules = [{"parent": -1, "className": "Model", "parameters": parameters(root)}]
    modules += [{"parent": 0, "name": n, "className": "Block", "parameters": parameters(s)} for n, s in blocks]
    return {
        "name": config.pop("name"),
        "tree": {"modules": modules},
        "policy": {"classes": {"classNames": ["Block"]}},
        "config": {"optimizer": {"kind": "OPTIMIZER_KIND_ADAMW"}, "trainersNeverWrite": True, **config},
    }


def llama(name: str, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification, and what each group computes for a token: products with matrices, and attention to half a sequence."""
    layers, width, wide, heads, kv_heads = LLAMAS[name]
    kv = width // heads * kv_heads
    block = {"wq": [width, width], "wk": [kv, width], "wv": [kv, width], "wo": [width, width], "w1": [wide, width],
             "w2": [width, wide], "w3": [wide, width], "norm1": [width], "norm2": [width]}  # fmt: skip
    products = sum(shape[0] * shape[1] for shape in block.values() if len(shape) == 2)
    names = [f"layers.{index}" for index in range(layers)]
    costs = {name: {"forwardFlopsPerToken": 2 * products + 2 * SEQUENCE * width} for name in names}
    costs["(root)"] = {"forwardFlopsPerToken": 2 * VOCABULARY * width}
    root = {"embed": [VOCABULARY, width], "norm": [width], "head": [VOCABULARY, width]}
    spec = spec_of(root, [(name, block) for name in names], name=f"{name}", strategy=strategy, forwardPrefetch=True,
                   mixedPrecision={"paramDtype": "DTYPE_BFLOAT16"})  # fmt: skip
    return spec, costs


def predict(bin_dir: Path, spec: dict[str, Any], machine: dict[str, Any], tokens: int, world: int, nodes: int,
            *more: str) -> dict[str, Any]:  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(machine, file)
        file.flush()
        command = [str(bin_dir / "shardctl"), "predict", "-", "--machine", file.name, "--tokens", str(tokens), "--json"]
        command += ["--world", str(world), "--nodes", str(nodes), *more]
        done = subprocess.run(command, input=json.dumps(spec), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def fleets(bin_dir: Path, tokens: int) -> list[dict[str, Any]]:
    rows = []
    print(
        "| model | GPUs | how | step, ms | computes | waits for unshards | for reductions | between nodes, GB | GiB of a GPU |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in LLAMAS:
        for strategy, how in (("STRATEGY_FULL_SHARD", "cut"), ("STRATEGY_HYBRID_SHARD", "replicas")):
            spec, costs = llama(name, strategy)
            for gpus in GPUS:
                nodes = gpus // GPUS_PER_NODE
                if nodes == 1 and how == "replicas":
                    continue
                found = predict(bin_dir, spec, {**H100, "groups": costs}, tokens, gpus, nodes, "--checkpointing")
                mib = found["memory_bytes"]["total"] / 2**20
                if mib > GPU_MIB:
                    print(f"| {name} | {gpus} | {how} | does not fit: {mib / 1024:.0f} GiB | | | | | |")
                    continue
                step = found["step_s"]
                rows.append({"model": name, "gpus": gpus, "how": how, **found})
                print(
                    f"| {name} | {gpus} | {how} | {step * 1e3:.0f} | {found['compute_s'] / step:.3f} "
                    f"| {found['exposed_unshard_s'] / step:.3f} | {found['exposed_reduction_s'] / step:.3f} "
                    f"| {found['node_link_bytes'] / 1e9:.2f} | {mib / 1024:.1f} |"
                )
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Share of the step in which a GPU computes, by the number of GPUs."""
    width, height, left, top = 760, 360, 70, 40
    colours = {"8B": "#4c78a8", "70B": "#59a14f", "405B": "#e08214"}

    def x(gpus: int) -> float:
        return left + (GPUS.index(gpus)) * (width - left - 150) / (len(GPUS) - 1)

    def y(share: float) -> float:
        return top + (1 - share) * (height - top - 50) / 0.5  # from a half to one

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="10" y="22">Predicted share of a step in which a GPU computes (solid: cut over all nodes; dashed: replicas)</text>',
    ]
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        lines.append(f'<line x1="{left}" x2="{x(GPUS[-1])}" y1="{y(share)}" y2="{y(share)}" stroke="#dddddd"/>')
        lines.append(f'<text x="{left - 40}" y="{y(share) + 4}">{share:.1f}</text>')
    lines += [f'<text x="{x(gpus)}" y="{height - 25}" text-anchor="middle">{gpus}</text>' for gpus in GPUS]
    for model, colour in colours.items():
        for how, dash in (("cut", ""), ("replicas", ' stroke-dasharray="6 4"')):
            points = [
                (x(r["gpus"]), y(r["compute_s"] / r["step_s"])) for r in rows if (r["model"], r["how"]) == (model, how)
            ]
            if not points:
                continue
            text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            lines.append(f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            lines.append(f'<text x="{points[-1][0] + 8}" y="{points[-1][1] + 4}" fill="{colour}">{model}, {how}</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def copy_rate() -> float:
    """Bytes read and written per second by one thread's copy, beyond the caches."""
    import numpy

    source = numpy.ones(32 << 20, numpy.uint8)
    target = numpy.empty_like(source)
    numpy.copyto(target, source)
    start = time.perf_counter()
    for _ in range(10):
        numpy.copyto(target, source)
    return 20 * source.nbytes / (time.perf_counter() - start)


def check(bin_dir: Path, result: Path, link_rate: float) -> None:
    sys.path.insert(0, str(ROOT / "client" / "examples" / "torch"))
    from torch_step import CONTEXT, SIZES

    from model import Gpt

    memory_rate = copy_rate()
    print(f"a copy reads and writes {memory_rate / 1e9:.1f} GB/s; a link between nodes has {link_rate / 1e9:.2f} GB/s")
    print("| size | how | measured, ms | predicted, ms | difference |")
    print("|---|---|---|---|---|")
    for measured in json.loads(result.read_text())["results"]:
        layers, width, heads, batch = SIZES[measured["size"]]
        shapes: dict[str, Shapes] = {}
        for name, parameter in Gpt(width, layers, heads, CONTEXT).named_parameters():
            block = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
            shapes.setdefault(block, {})[name.replace(".", "_")] = list(parameter.shape)
        root = shapes.pop("")
        spec = spec_of(root, list(shapes.items()), name=measured["size"], layout="LAYOUT_DIM0")
        floor = measured["implementations"]["floor"]
        costs = {
            name: {"forwardS": floor["forward"] / 1e3 / layers, "backwardS": floor["backward"] / 1e3 / layers}
            for name in shapes
        }
        costs["(root)"] = {"forwardS": 0.0, "backwardS": 0.0}
        machine = {"name": "CPU", "gpus": False, "sharesCores": True, "flopsPerS": 1.0, "memoryBytesPerS": memory_rate,
                   "deviceLinkBytesPerS": memory_rate, "nodeLinkBytesPerS": link_rate, "transferS": 1e-4, "otherNodeS": 1e-4,
                   "requestS": 2e-5, "stepS": 2e-4, "groups": costs}  # fmt: skip
        for how, nodes in (("shardd", 1), ("sharddn", 2)):
            if how in measured["implementations"]:
                want = measured["implementations"][how]["all"]
                got = predict(bin_dir, spec, machine, batch * CONTEXT, measured["world"], nodes)["step_s"] * 1e3
                print(f"| {measured['size']} | {how} | {want:.1f} | {got:.1f} | {got / want - 1:+.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=ROOT / "build" / "release" / "bin", help="where shardctl is")
    parser.add_argument("--fleets", action="store_true", help="the table of large fleets")
    parser.add_argument("--tokens", type=int, default=SEQUENCE, help="of a GPU and step, in the table")
    parser.add_argument("--svg", type=Path, help="draw that table there")
    parser.add_argument("--check", type=Path, help="what torch_step.py --json has written")
    parser.add_argument(
        "--link", type=float, default=0.9e9, help="bytes per second between nodes (bench_peer), for --check"
    )
    args = parser.parse_args()
    if args.fleets:
        rows = fleets(args.bin, args.tokens)
        if args.svg:
            draw(rows, args.svg)
    if args.check:
        check(args.bin, args.check, args.link)


if __name__ == "__main__":
    main()
