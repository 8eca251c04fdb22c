"""What type checkers are told of the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardd
from cluster import PACKAGE


def test_the_stub_names_what_the_extension_has(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not in .venv; run deploy/bootstrap.sh")
    allowed = tmp_path / "allowed"  # pybind11's metaclass, and its constructor that only raises
    allowed.write_text("shardd._C.Engine\nshardd._C.Engine.__init__\nshardd._C.HeldShard\nshardd._C.Unit\n")
    # Torch's types are CI's run of mypy over the package to check; here names count, and reading torch takes a minute.
    config = tmp_path / "config"
    config.write_text("[mypy]\n[mypy-torch]\nfollow_imports = skip\n")
    result = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "shardd._C", f"--allowlist={allowed}", f"--mypy-config-file={config}"],
        env=dict(os.environ, PYTHONPATH=str(PACKAGE), MYPY_CACHE_DIR=str(tmp_path)),
        capture_output=True, text=True, check=False)  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_package_is_typed_and_has_the_projects_version() -> None:
    assert (PACKAGE / "shardd" / "py.typed").exists()
    header = (PACKAGE.parents[2] / "common" / "version.h").read_text()
    assert f'kVersion[] = "{shardd.__version__}"' in header
