"""One place in each language reads environment variables, and client/docs/launching.md names each of them."""

from __future__ import annotations

import re

from cluster import PACKAGE, ROOT
from shardd.torch._process import environment

TEXT = (ROOT / "client" / "docs" / "launching.md").read_text()
ROWS = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", TEXT, re.MULTILINE)


def _documented(reader: str) -> set[str]:
    return {name for names, readers in ROWS if reader in readers for name in re.findall(r"`(SHARDD_\w+)`", names)}


def test_the_table_names_what_the_package_reads() -> None:
    assert _documented("Python package") == environment.NAMES


def test_no_other_module_of_the_package_reads_one() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "environment.py":
            assert not re.search(r"\b(os|from os import)\W*(environ|getenv)\b", path.read_text()), path


def test_one_function_of_the_library_and_the_daemon_reads_them() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for folder in ("client/c", "client/cpp", "client/ctl", "client/fsdp", "client/torch", "common", "server")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cc", ".h") and re.search(r"\bgetenv\(", path.read_text())
    }
    assert readers == {"common/process/environment.cc"}


def test_the_table_names_what_the_library_and_the_daemon_read() -> None:
    for reader, folders in ("library", ["client/c", "common"]), ("daemon", ["server"]):
        read = {
            name
            for folder in folders
            for path in (ROOT / folder).rglob("*.cc")
            for name in re.findall(r'(?:Environment|EnvironmentNumber)\("(SHARDD_\w+)"', path.read_text())
        }
        assert read == _documented(reader), reader


def test_a_value_that_is_no_number_is_named(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SHARDD_TIMEOUT_MS", "5m")
    try:
        environment.timeout_ms()
    except ValueError as error:
        assert "SHARDD_TIMEOUT_MS" in str(error) and "'5m'" in str(error)
    else:
        raise AssertionError
