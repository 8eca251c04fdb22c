"""The programs in the wheel, as commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def _run(name: str) -> NoReturn:
    path = Path(__file__).parent / "bin" / name
    if not path.exists():
        raise SystemExit(f"{name}: not in this installation (looked for {path}); it is in the project's build folder")
    os.execv(path, [name, *sys.argv[1:]])


def shardd() -> NoReturn:
    _run("shardd")


def shardctl() -> NoReturn:
    _run("shardctl")
