#!/usr/bin/env python3
"""Registers, shared memory, stack and spills of every CUDA kernel, as a table: what `ptxas -v` wrote while they compiled.

Usage: .ci/kernel_resources.py FILE.ptxas ARCHITECTURE...
Status 1: a kernel spills more than MAX_SPILL_BYTES, takes more than MAX_REGISTERS (then fewer than four blocks of 256
threads fit a multiprocessor), has static shared memory (none needs it), or is missing for one of the architectures.
"""

import re
import sys

MAX_REGISTERS = 64
MAX_SPILL_BYTES = 0
KERNELS = ["adamw", "cast", "finite", "norm", "norm_finish", "reduce", "rule", "sgd"]

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def parse(path: str) -> dict[tuple[str, str], dict[str, int]]:
    """(kernel, architecture) -> numbers. Called functions stand between an entry's lines: those of the entry count."""
    kernels: dict[tuple[str, str], dict[str, int]] = {}
    entry = None
    counts = False
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if match := ENTRY.search(line):
                entry = kernels.setdefault((match[1], match[2]), {})
            elif "Function properties for" in line:
                counts = True
            if entry is None:
                continue
            if counts and (match := PROPERTIES.search(line)):
                stack, stores, loads = (int(number) for number in match.groups())
                entry["stack"] = max(stack, entry.get("stack", 0))
                entry["spill"] = max(stores + loads, entry.get("spill", 0))
            elif match := USED.search(line):
                entry["registers"] = int(match[1])
                shared = SHARED.search(line)
                entry["shared"] = int(shared[1]) if shared else 0
    return kernels


def main() -> int:
    path, architectures = sys.argv[1], [f"sm_{number}" for number in sys.argv[2:]]
    kernels = parse(path)
    faults = []
    print("| kernel | " + " | ".join(architectures) + " |")
    print("|---|" + "---|" * len(architectures))
    for kernel in KERNELS:
        cells = []
        for architecture in architectures:
            use = kernels.get((f"shardd_{kernel}", architecture))
            if use is None or not {"registers", "stack"} <= use.keys():
                faults.append(f"{kernel} for {architecture}: ptxas wrote nothing of it")
                cells.append("missing")
                continue
            cells.append(f"{use['registers']}; {use['shared']}; {use['stack']}; {use['spill']}")
            if use["registers"] > MAX_REGISTERS or use["spill"] > MAX_SPILL_BYTES or use["shared"] > 0:
                faults.append(
                    f"{kernel} for {architecture}: registers {use['registers']} (at most {MAX_REGISTERS}), bytes spilled "
                    f"{use['spill']} (at most {MAX_SPILL_BYTES}), of shared memory {use['shared']} (none)"
                )
        print(f"| `shardd_{kernel}` | " + " | ".join(cells) + " |")
    print("\nIn a cell: registers; bytes of shared memory; of stack; of spills.")
    for fault in faults:
        print(f"kernel resources: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
