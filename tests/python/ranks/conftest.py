"""Daemons of several nodes, which the tests of a module share. Whoever kills a daemon starts nodes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from node_daemons import Nodes, nodes


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    with nodes() as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    with nodes(3) as made:
        yield made


@pytest.fixture(scope="module")
def four() -> Iterator[Nodes]:
    with nodes(4) as made:
        yield made
