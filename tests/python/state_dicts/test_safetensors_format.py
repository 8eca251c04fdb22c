"""Bytes that are nearly a safetensors file, or none: tensors that lie within the file, or an error that names it. Seeded."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch

from shardd.torch._state_dicts.safetensors_format import INDEX, Target, encode_header, read_directory

_ROUNDS = 600


def _file(random_: random.Random) -> bytes:
    """A good one, of a few tensors."""
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    targets = [
        Target(
            f"layers.{i}.weight",
            tuple(random_.randrange(4) for _ in range(random_.randrange(3))),
            random_.choice(kinds),
        )
        for i in range(random_.randrange(1, 4))
    ]
    header = encode_header(targets, {"format": "pt", "tied": "layers.0.weight"})
    return header + bytes(sum(target.bytes for target in targets))


_VALUES = [None, True, 0, -1, 1.5, 2**31, 2**63, 2**70, "", "F32", "layers.0.weight", [], [0], [0, 4], [4, 0], [-4, 0], [[]],
           ["a"], {}, {"dtype": "F32"}, {"a": {}}, float("nan")]  # fmt: skip


def _change(header: object, random_: random.Random) -> object:
    """One value of it is another."""
    if isinstance(header, dict) and header and random_.random() < 0.8:
        key = random_.choice(list(header))
        if random_.random() < 0.15:
            return {k: v for k, v in header.items() if k != key}
        return {**header, key: _change(header[key], random_)}
    if isinstance(header, list) and header and random_.random() < 0.6:
        at = random_.randrange(len(header))
        return [_change(v, random_) if i == at else v for i, v in enumerate(header)]
    return random_.choice(_VALUES)


def _mutated(good: bytes, random_: random.Random) -> bytes:
    way = random_.randrange(4)
    if way == 0:  # any bytes
        out = bytearray(good)
        for _ in range(random_.randrange(1, 6)):
            out[random_.randrange(len(out))] = random_.randrange(256)
        return bytes(out)
    if way == 1:  # cut off
        return good[: random_.randrange(len(good))]
    length = struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8 : 8 + length])
    for _ in range(random_.randrange(1, 3)):
        header = _change(header, random_)
    text = json.dumps(header).encode()
    return (
        struct.pack("<Q", max(0, len(text) + (random_.randrange(-2, 3) if way == 3 else 0))) + text + good[8 + length :]
    )


def _check(path: Path) -> bool:
    """Whether it was read."""
    try:
        found, aliases = read_directory(str(path))
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error)
        return False
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in aliases.items())
    for fqn, stored in found.items():
        assert isinstance(fqn, str) and all(type(size) is int and size >= 0 for size in stored.shape)
        size = Path(stored.path).stat().st_size
        numel = 1
        for length in stored.shape:
            numel *= length
        assert stored.offset_bytes >= 0 and stored.offset_bytes + numel * stored.dtype.itemsize <= size
    return True


def test_a_file_is_read_or_refused_by_name(tmp_path: Path) -> None:
    random_ = random.Random(20)
    path = tmp_path / "model.safetensors"
    read = 0
    for _ in range(_ROUNDS):
        good = _file(random_)
        path.write_bytes(good)
        assert _check(path)
        path.write_bytes(_mutated(good, random_))
        read += _check(path)
    assert 20 < read < _ROUNDS - 20  # both happen often, or this checks nothing


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}',
                                   '{"weight_map": {"a": ".."}}', '{"weight_map": {"a": "none"}}', "\udcff"])  # fmt: skip
def test_an_index_is_read_or_refused_by_name(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(index.encode("utf-8", "surrogateescape"))
    assert not _check(tmp_path)
