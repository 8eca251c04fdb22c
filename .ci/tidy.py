#!/usr/bin/env python3
"""clang-tidy over the product's sources (common, server, client), as the compilation database of a clang build has them.

Files that passed are remembered under .cache/tidy by the hash of their preprocessed text, command and configuration, so
that a second run looks only at what changed. Usage: .ci/tidy.py <build folder> [path prefix...]
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "tidy"
FOLDERS = ("common/", "server/", "client/")
TIDY = "clang-tidy-14"


def fingerprint(entry):
    """Hash of everything that the verdict depends on; None where the file does not preprocess."""
    command = shlex.split(entry["command"])
    while command and "clang" not in os.path.basename(command[0]):
        command = command[1:]  # ccache and its settings
    command = [c for c in command if c != "-c"]
    if "-o" in command:
        at = command.index("-o")
        del command[at : at + 2]
    result = subprocess.run(command + ["-E", "-P", "-o", "-"], cwd=entry["directory"], capture_output=True)
    if result.returncode != 0:
        return None
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
    digest.update(pathlib.Path(entry["file"]).read_bytes())  # NOLINT comments are not in the preprocessed text
    digest.update(result.stdout)
    return digest.hexdigest()


def check(build, entry):
    """(file, text of complaints) for one entry of the database."""
    key = fingerprint(entry)
    if key is not None and (CACHE / key).exists():
        return entry["file"], ""
    result = subprocess.run([TIDY, "-p", build, "--quiet", entry["file"]], capture_output=True, text=True)
    if result.returncode == 0 and not re.search(r": (warning|error): ", result.stdout):
        if key is not None:
            (CACHE / key).touch()
        return entry["file"], ""
    return entry["file"], result.stdout or result.stderr


def main():
    build = sys.argv[1]
    prefixes = tuple(sys.argv[2:]) or FOLDERS
    CACHE.mkdir(parents=True, exist_ok=True)
    entries = {}
    for entry in json.loads(pathlib.Path(build, "compile_commands.json").read_text()):
        path = os.path.relpath(entry["file"], ROOT)
        if path.startswith(prefixes):
            entries.setdefault(path, entry)
    if not entries:
        print(f"tidy {build}: no source of the project in its compilation database")
        return 1
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, text in pool.map(lambda entry: check(build, entry), entries.values()):
            if text:
                bad += 1
                print(f"-- {os.path.relpath(file, ROOT)}\n{text}", flush=True)
    print(f"clang-tidy: {len(entries)} files, {bad} with complaints")
    return 1 if bad else 0


sys.exit(main())
