"""The sdist: whole, and nothing that a build has left."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("common", "proto", "server", "deploy", "client/c", "client/cpp", "client/ctl", "client/fsdp", "client/torch")


def backend(hook: str, source: Path, folder: Path) -> Path:
    """What the build backend's ``hook``, run in ``source`` as pip does, leaves in ``folder``."""
    pytest.importorskip("scikit_build_core", reason="no scikit-build-core; deploy/bootstrap.sh installs it")
    code = f"import sys, scikit_build_core.build as backend; print(backend.{hook}(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr + made.stdout
    return folder / made.stdout.split()[-1]


def test_it_has_every_source_and_is_configured_alone(tmp_path: Path) -> None:
    with tarfile.open(backend("build_sdist", ROOT / "client" / "python", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
        archive.extractall(tmp_path)
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:  # else: no checkout
        assert {f"source/{name}" for name in listed.stdout.splitlines()} - names == set()
    assert {"pyproject.toml", "CMakeLists.txt", "src/shardd/torch/__init__.py", "extension/unit.cc"} <= names
    left = [name for name in names if name.endswith((".so", ".pyc", "_built_for.txt")) or "/build/" in name]
    assert left == []
    (unpacked,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    metadata = backend("prepare_metadata_for_build_wheel", unpacked, tmp_path / "metadata") / "METADATA"
    assert f"Version: {unpacked.name.removeprefix('shardd-')}" in metadata.read_text()
    command = ["cmake", "-S", str(unpacked), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    command += [f"-DPython3_EXECUTABLE={sys.executable}", f"-DSHARDD_PIC_DIR={ROOT}/.cache/pic"]
    command += [f"-DSHARDD_NVIDIA_DIR={ROOT}/.cache/nvidia"]
    configured = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HOME": str(tmp_path)})
    assert configured.returncode == 0, configured.stderr
