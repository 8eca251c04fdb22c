"""torch's own optimizers of this process, found without a look at every object of the process.

Python's objects are hundreds of thousands, and to look at all of them takes 95 ms, more than a short-lived model's first step.
So every optimizer that is made is noted, however that is done (constructed, copied, unpickled): all pass ``__new__``, or where
another class makes them what torch's ``__init__`` calls.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.optim import Optimizer

_live: dict[int, weakref.ref[Any]] = {}  # by id: a class may define equality and be unhashable


def _note(optimizer: Optimizer) -> None:
    key = id(optimizer)
    _live[key] = weakref.ref(optimizer, lambda gone: _live.pop(key, None) if _live.get(key) is gone else None)


def _classes(of: type) -> Iterator[type]:
    yield of
    derived: list[type] = of.__subclasses__()
    for each in derived:
        yield from _classes(each)


def _some_were_made() -> bool:
    """Whether there may be optimizers already: torch marks the ``step`` of a class when its first one is constructed."""
    return any(getattr(getattr(kind, "step", None), "hooked", False) for kind in _classes(Optimizer))


_unseen = _some_were_made()  # optimizers of before this module, which nobody has looked for yet
_new_before = Optimizer.__new__
_patch_before = Optimizer._patch_step_function


def _new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    new = _new_before
    if new is object.__new__:  # torch's class has none: a class that has other bases, too, may find theirs
        new = super(Optimizer, cls).__new__
    made = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
    _note(made)
    return made


def _patch(optimizer: Any) -> None:
    """What torch calls where it constructs or unpickles an optimizer: of a class that has another base in front, which makes it."""
    _patch_before(optimizer)
    _note(optimizer)


Optimizer.__new__ = staticmethod(_new)  # type: ignore[method-assign]
Optimizer._patch_step_function = _patch  # type: ignore[assignment, method-assign]


def _all() -> list[Optimizer]:
    global _unseen
    if _unseen:
        for candidate in gc.get_objects():
            if issubclass(type(candidate), Optimizer):
                _note(candidate)
        _unseen = False
    return [optimizer for ref in list(_live.values()) if (optimizer := ref()) is not None]


def _is_shell(optimizer: Optimizer) -> bool:
    """Whether it stands for other optimizers, which step: as those of accelerate (which has nothing of its own), of Lightning
    (which shares all the other has) and of torchtitan (``lists_optimizers``)."""
    own = vars(optimizer)
    return (
        "param_groups" not in own
        or any(
            issubclass(type(value), Optimizer) and vars(value).get("param_groups") is own["param_groups"]
            for value in own.values()
        )
        or lists_optimizers(optimizer)
    )


def lists_optimizers(optimizer: Optimizer) -> bool:
    """Whether it has a list, or a dict, of optimizers which step all its parameters, and no state: a container, whose step is theirs.
    What it stores itself is an edit in place as any other."""
    own = vars(optimizer)
    if own.get("state"):  # a stand-in that torch has not initialised has no such attribute
        return False
    lists: list[Iterable[Any]] = [value for value in own.values() if type(value) in (list, tuple)]
    dicts = [value.values() for value in own.values() if isinstance(value, dict)]
    lists += [
        values for values in dicts if all(issubclass(type(each), Optimizer) for each in values)
    ]  # of theirs alone
    listed = [each for value in lists for each in value if issubclass(type(each), Optimizer) and each is not optimizer]
    return bool(listed) and _param_ids(optimizer) <= set().union(*map(_param_ids, listed))


def _param_ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in vars(optimizer).get("param_groups", ()) for p in group["params"]}


def optimizers_of(params: Iterable[Any], but_not: Callable[[Optimizer], bool]) -> list[Optimizer]:
    """torch's optimizers of this process that have one of these parameters; none of which ``but_not`` is true."""
    return optimizers_with({id(p) for p in params}, but_not)


def optimizers_with(wanted: set[int], but_not: Callable[[Optimizer], bool]) -> list[Optimizer]:
    """As ``optimizers_of``, by the parameters' ids."""
    return [
        optimizer
        for optimizer in _all()
        if not _is_shell(optimizer) and not but_not(optimizer) and not wanted.isdisjoint(_param_ids(optimizer))
    ]
