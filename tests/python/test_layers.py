"""The imports of ``shardd.torch`` go one way: no circle of modules, and no package imports one below it in README.md's table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from cluster import PACKAGE

_ROOT = "shardd.torch"
_FOLDER = PACKAGE / "shardd" / "torch"


def _modules() -> dict[str, Path]:
    """By dotted name, the whole package ``shardd``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(name: str, path: Path, known: set[str]) -> set[str]:
    """Modules of the package that this one imports, anywhere in its text: in functions and for type checkers, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{name}: a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(module for module in inner if module in known)
            if any(module not in known for module in inner):
                found.add(node.module)
    return (found & known) - {name}


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    return {name: _imports(name, path, set(modules)) for name, path in modules.items()}


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of modules, or none."""
    done: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in done:
            return []
        for to in sorted(graph[name]):
            if found := visit(to, [*above, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def _layers() -> list[str]:
    """Of README.md's table, the lowest first."""
    return re.findall(r"^\| `(\w+)` \|", (_FOLDER / "README.md").read_text(), re.M)


def _layer(module: str) -> str:
    return module.removeprefix(f"{_ROOT}.").split(".")[0]


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert _circle(_graph()) == []


def test_every_package_has_its_place_in_the_table() -> None:
    packages = {_layer(name) for name in _modules() if name.startswith(f"{_ROOT}.")}
    assert sorted(_layers()) == sorted(packages - {"__main__"})


def test_no_package_imports_one_below_it_in_the_table() -> None:
    order = {layer: number for number, layer in enumerate(_layers())}
    wrong = [
        f"{name} imports {to}"
        for name, imports in sorted(_graph().items())
        if _layer(name) in order and name != _ROOT
        for to in sorted(imports)
        if to == _ROOT or (to.startswith(f"{_ROOT}.") and order[_layer(to)] > order[_layer(name)])
    ]
    assert wrong == []


def test_functions_import_nothing_of_the_package() -> None:
    """A function-level import hides a circle."""
    inside = [
        f"{name}:{node.lineno}"
        for name, path in _modules().items()
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardd")
    ]
    assert inside == []
