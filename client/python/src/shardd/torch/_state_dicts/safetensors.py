"""Models to and from directories of safetensors files, each rank its own elements: nobody holds more than its shard."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from shardd.torch._job.job import TorchJob, job_of
from shardd.torch._ranks.agreement import Meeting
from shardd.torch._state_dicts.pieces import Piece, jobs_of, meeting_of, pieces_of
from shardd.torch._state_dicts.safetensors_format import (
    INDEX,
    SINGLE,
    Stored,
    Target,
    encode_header,
    plan_files,
    read_directory,
)
from shardd.torch._units.state import state_of

__all__ = ["load_safetensors", "save_safetensors"]

logger = logging.getLogger("shardd.torch")

_CHUNK_BYTES = 16 << 20  # of what is cast on its way
_HAND_IN_BYTES = 4 << 20
_PARTIAL = ".partial"
_SECOND = "-b"  # ends the names of files beside those of an earlier save
_OURS = re.compile(rf"model-\d{{5}}-of-\d{{5}}({_SECOND})?\.safetensors({re.escape(_PARTIAL)})?")
_LEAVE_S = 30.0  # for another rank to hear what has failed here
_FILE_LIMIT_S = 24 * 3600.0  # disks have their own pace; a rank that dies ends the wait


def _together(meeting: Meeting, what: str, part: str, work: Callable[[], Any]) -> Any:
    """``work`` on this rank, which is ``part`` of it; raises on all ranks where it raised on one."""
    try:
        result = work()
    except BaseException as error:  # Ctrl-C, too: the others would wait
        meeting.agree(what, error, part=part)
        raise
    meeting.agree(what, limit_s=_FILE_LIMIT_S, part=part)
    return result


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.view(torch.uint8).numpy()))


def _write(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _read(fd: int, data: memoryview, offset: int, path: str) -> None:
    while len(data):
        done = os.preadv(fd, [data], offset)
        if done == 0:
            raise OSError(f"read {path}: it ends at byte {offset} (want {len(data)} more)")
        data, offset = data[done:], offset + done


class _Files:
    """Open files by path, closed together."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._open: dict[str, int] = {}

    def fd(self, path: str) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, self._flags | os.O_CLOEXEC, 0o666)
        return self._open[path]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        for fd in self._open.values():
            if kind is None and self._flags & os.O_RDWR:
                os.fdatasync(fd)
            os.close(fd)


def save_safetensors(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes parameters and persistent buffers as ``model-0000k-of-0000N.safetensors`` with an index.

    transformers and safetensors read it. Names are those of the bare model. All ranks call it; each writes the elements
    of its own shards, so ``directory``, which is made where it is missing, is one that all ranks see. ``dtype``:
    floating-point values are cast to it. Tied parameters are stored once, under their first name, the others in the
    metadata, as ``safetensors.torch.save_model`` does. Raises on all ranks where one fails. What an earlier save left in
    ``directory`` is there until all of this one is on the disk: whoever dies meanwhile, it can be read as before. Where
    both would have the same names, the new files' end in ``-b``, or no longer do.
    """
    folder = os.fspath(directory)
    what = f"save_safetensors {folder}"
    meeting = meeting_of(model, "safetensors")
    with torch.no_grad():
        pieces, targets, headers = _together(
            meeting, what, "save: plan", lambda: _plan(model, folder, dtype, max_shard_bytes, meeting.rank == 0)
        )
        names = _together(meeting, what, "save: write", lambda: _write_pieces(folder, pieces, targets, len(headers)))
    _together(
        meeting,
        what,
        "save: finish",
        lambda: _finish(folder, pieces, targets, names) if meeting.rank == 0 else None,
    )


def _names(count: int, ending: str) -> list[str]:
    return [f"model-{number + 1:05}-of-{count:05}{ending}.safetensors" for number in range(count)]


def _read_now(folder: str) -> set[str]:
    """The files that the directory's index names, which a save must not touch."""
    try:
        with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
            return set(json.load(file)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()  # nobody reads it


def _new_names(folder: str, count: int) -> list[str]:
    """Names of files that nobody reads: of two saves in turns, where each has as many files."""
    read_now = _read_now(folder)
    plain = _names(count, "")
    return _names(count, _SECOND) if read_now.intersection(plain) else plain


def _begun_names(folder: str, count: int) -> list[str]:
    """What rank 0 has found and begun."""
    plain = _names(count, "")
    begun = not plain or os.path.exists(os.path.join(folder, plain[0] + _PARTIAL))
    return plain if begun else _names(count, _SECOND)


def _sync(folder: str) -> None:
    """What has been renamed or removed in it is so behind a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync no folders
            raise
    finally:
        os.close(fd)


def _plan(
    model: nn.Module, folder: str, dtype: torch.dtype | None, max_shard_bytes: int, makes_files: bool
) -> tuple[list[Piece], list[Target], list[bytes]]:
    for module in model.modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise NotImplementedError(f"save_safetensors: {type(module).__name__} has extra state, which is no tensor")
    pieces = pieces_of(model, makes_files)
    targets = [
        Target(p.fqn, p.shape, dtype if dtype is not None and p.dtype.is_floating_point else p.dtype) for p in pieces
    ]
    count = plan_files(targets, max_shard_bytes)
    names: list[str] = []
    if makes_files:
        names = _new_names(folder, count)
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):  # of a save that did not end
            if name.endswith(_PARTIAL) and _OURS.fullmatch(name):
                os.remove(os.path.join(folder, name))
    headers = []
    for number in range(count):
        inside = [t for t in targets if t.file == number]
        aliases = {a: p.fqn for p, t in zip(pieces, targets) if t.file == number for a in p.aliases}
        headers.append(encode_header(inside, {"format": "pt", **aliases}))
        if makes_files:
            with open(os.path.join(folder, names[number] + _PARTIAL), "wb") as file:
                file.write(headers[-1])
                file.truncate(len(headers[-1]) + sum(t.bytes for t in inside))
    return pieces, targets, headers


def _write_pieces(folder: str, pieces: list[Piece], targets: list[Target], count: int) -> list[str]:
    """Returns the names of the files, which still end in `_PARTIAL`."""
    names = _begun_names(folder, count)
    with _Files(os.O_RDWR) as files:
        for piece, target in zip(pieces, targets):
            if not piece.writes or not piece.local.numel():
                continue
            fd = files.fd(os.path.join(folder, names[target.file] + _PARTIAL))
            size, done = target.dtype.itemsize, 0
            for part in piece.local.split(_CHUNK_BYTES // max(piece.dtype.itemsize, size)):
                data = _bytes_of(part.to("cpu", target.dtype))
                for element, begin, end in piece.runs(done, done + part.numel()):
                    _write(fd, data[begin * size : end * size], target.offset_bytes + element * size)
                done += part.numel()
    return names


def _finish(folder: str, pieces: list[Piece], targets: list[Target], names: list[str]) -> None:
    """Readers find what an earlier save left until the index is replaced, and this one from there on."""
    index = os.path.join(folder, INDEX)
    content = {
        "metadata": {
            "total_size": sum(t.bytes for t in targets),
            "total_parameters": sum(p.numel for p in pieces),
        },
        "weight_map": {t.fqn: names[t.file] for t in sorted(targets, key=lambda t: t.fqn)},
    }
    with open(index + _PARTIAL, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    for name in names:
        os.replace(os.path.join(folder, name + _PARTIAL), os.path.join(folder, name))
    _sync(folder)
    os.replace(index + _PARTIAL, index)
    _sync(folder)
    single = os.path.join(folder, SINGLE)
    if os.path.exists(single):  # which other readers prefer to the index
        os.remove(single)
    for name in os.listdir(folder):
        if _OURS.fullmatch(name) and name not in names:
            os.remove(os.path.join(folder, name))
    _sync(folder)


def load_safetensors(model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True) -> _IncompatibleKeys:
    """Reads parameters and persistent buffers from a directory (or one file) of safetensors, cast to the model's dtypes.

    All ranks call it; each reads the elements of its own shards and nothing else. Into a registered model it is a load
    like ``load_state_dict``: with the daemon's optimizer and in-place edits off it is committed when this returns, else
    where the next pass begins. ``strict``: missing and unexpected names are an error; else they are returned. Raises on
    all ranks where one fails. Names, shapes and sizes are checked before anything changes. Where a file cannot be read
    behind that, nothing is committed and all ranks give the job up: a program that ends with the error is resumed at the
    committed step.
    """
    folder = os.fspath(directory)
    what = f"load_safetensors {folder}"
    meeting = meeting_of(model, "safetensors")
    with torch.no_grad():
        keys, found = _together(meeting, what, "load: check", lambda: _check(model, folder, strict))
        streamed = [job for job in jobs_of(model) if not job.passes]
        try:
            _together(meeting, what, "load: begin", lambda: _begin_load(model, streamed))
            _together(meeting, what, "load: read", lambda: _read_pieces(model, found, streamed))
        except BaseException:
            with contextlib.suppress(Exception):  # the others learn why before they learn that this rank has gone
                meeting.agree(f"leave {what}", limit_s=_LEAVE_S)
            for job in jobs_of(model):
                # The daemon puts back what was there when the session ends without a commit.
                logger.error(
                    'job "%s": %s failed, so nothing of it is committed; this rank gives the job up', job.name, what
                )
                with contextlib.suppress(Exception):
                    job.close(finished=False)
            raise
        _together(meeting, what, "load: commit", lambda: _commit_load(model, streamed))
    return keys


def _check(model: nn.Module, folder: str, strict: bool) -> tuple[_IncompatibleKeys, list[tuple[Piece, Stored]]]:
    stored, aliases = read_directory(folder)
    pieces = pieces_of(model, False)
    found: list[tuple[Piece, Stored]] = []
    missing: list[str] = []
    known = set()
    for piece in pieces:
        names = [piece.fqn, *piece.aliases]
        known.update(names)
        names += [aliases[name] for name in names if name in aliases]
        name = next((name for name in names if name in stored), None)
        if name is None:
            missing.append(piece.fqn)
            continue
        known.add(name)
        item = stored[name]
        if item.shape != piece.shape:
            raise ValueError(
                f'load "{piece.fqn}" from {item.path}: wrong shape (got {list(item.shape)}, want {list(piece.shape)})'
            )
        found.append((piece, item))
    unexpected = [name for name in stored if name not in known]
    if strict and (missing or unexpected):
        parts = [
            f'{len(m)} {kind}; e.g. "{m[0]}"' for kind, m in (("missing", missing), ("unexpected", unexpected)) if m
        ]
        raise ValueError(f"load {folder} into {type(model).__name__}: its names differ ({', '.join(parts)})")
    return _IncompatibleKeys(missing, unexpected), found


def _begin_load(model: nn.Module, streamed: list[TorchJob]) -> None:
    """`streamed`: their shards are read-only here, so the daemon is given the values."""
    for job in jobs_of(model):
        if job.passes:
            job.open_write(model)
    for job in streamed:
        assert job.engine is not None  # of a registered model
        job.engine.enter_full_params(True)


def _read_pieces(model: nn.Module, found: list[tuple[Piece, Stored]], streamed: list[TorchJob]) -> None:
    stores = _Stores(model, [piece for piece, _ in found])
    with _Files(os.O_RDONLY) as files:
        for piece, item in found:
            if piece.local.numel():
                _load_piece(files.fd(item.path), piece, item, None if piece.job in streamed else stores)


def _commit_load(model: nn.Module, streamed: list[TorchJob]) -> None:
    for state in (s for m in model.modules() if (s := state_of(m)) is not None):
        state.loaded = state.loaded or job_of(state) is None
    for job in streamed:
        assert job.engine is not None  # as it was when the load began
        job.engine.commit()
        job.engine.leave_full_params()
    for job in jobs_of(model):
        if job.passes:
            job.commit_write(model)


class _Stores:
    """Hands in what the load has stored into shards, which is private memory of this process until then: 4 MiB of a job,
    or a 32nd of its shards where that is more, since each time costs a look at all of their pages."""

    def __init__(self, model: nn.Module, pieces: list[Piece]) -> None:
        self._model = model
        self._most: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        for piece in pieces:
            key = id(piece.job)
            self._most[key] = self._most.get(key, 0) + piece.local.nbytes // 32

    def stored(self, piece: Piece, nbytes: int) -> None:
        key = id(piece.job)
        self._stored[key] = self._stored.get(key, 0) + nbytes
        if piece.job is not None and self._stored[key] >= max(self._most[key], _HAND_IN_BYTES):
            piece.job.hand_in_written(self._model)
            self._stored[key] = 0


def _load_piece(fd: int, piece: Piece, item: Stored, stores: _Stores | None) -> None:
    """`stores`: None where the daemon is given the values."""
    size, done = item.dtype.itemsize, 0
    in_place = item.dtype == piece.dtype and stores is not None and piece.local.device.type == "cpu"
    for part in piece.local.split(_CHUNK_BYTES // max(piece.dtype.itemsize, size)):
        read = part if in_place else torch.empty(part.numel(), dtype=item.dtype)
        data = _bytes_of(read)
        for element, begin, end in piece.runs(done, done + part.numel()):
            _read(fd, data[begin * size : end * size], item.offset_bytes + element * size, item.path)
        if stores is None:
            piece.job.engine.write(piece.index, read.to(piece.dtype), piece.job_first + done)
        elif not in_place:
            part.copy_(read)
        if stores is not None:
            stores.stored(piece, part.nbytes)
        done += part.numel()
    if piece.back is not None:
        piece.back.copy_(piece.local.view(piece.shape))
