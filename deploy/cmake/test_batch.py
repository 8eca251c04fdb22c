#!/usr/bin/env python3
"""Writes one source that stands for several tests': test_batch.py OUT SOURCE...

A compiler that takes them together reads their headers once. Tests have the same short names everywhere, so each source's
anonymous namespace gets a name of its own; messages and assertions name the files and lines of the sources.
"""

import os
import pathlib
import re
import sys


def main() -> None:
    out, *sources = map(pathlib.Path, sys.argv[1:])
    parts = []
    for source in sources:
        name = "of_" + re.sub(r"\W", "_", "_".join(source.parts[-2:]))
        # As the compiler, which runs in the same folder, is given it.
        lines = [f'#line 1 "{os.path.relpath(source)}"\n']
        for line in source.read_text().splitlines(keepends=True):
            if line.rstrip() == "namespace {":
                line = f"namespace {name} {{\n"
            elif line.rstrip() == "}  // namespace":
                line = f"}} using namespace {name};\n"
            lines.append(line)
        parts.append("".join(lines))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(parts))


main()
