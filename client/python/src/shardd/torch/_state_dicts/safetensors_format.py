"""The safetensors file format: an eight-byte length, a JSON header, the tensors' bytes without gaps.

Directories are as Hugging Face's tools write them: ``model-0000k-of-0000N.safetensors`` and an index that says which
tensor is in which file; a single ``model.safetensors`` is read too.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["INDEX", "Stored", "Target", "encode_header", "plan_files", "read_directory"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # what the reference implementation accepts

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass
class Target:
    """A tensor to be written."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: int = 0
    offset_bytes: int = 0  # in its file

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Stored:
    """A tensor in a file."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int


def encode_header(targets: list[Target], metadata: dict[str, str]) -> bytes:
    """Encodes the header of one file and gives its tensors their places: larger elements first, so that all are aligned."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for target in sorted(targets, key=lambda t: -t.dtype.itemsize):
        if target.dtype not in _NAMES:
            raise ValueError(f'save "{target.fqn}": safetensors has no {target.dtype}')
        header[target.fqn] = {
            "dtype": _NAMES[target.dtype],
            "shape": list(target.shape),
            "data_offsets": [end, end + target.bytes],
        }
        target.offset_bytes = end
        end += target.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    for target in targets:
        target.offset_bytes += 8 + len(text)
    return struct.pack("<Q", len(text)) + text


def plan_files(targets: list[Target], max_shard_bytes: int) -> int:
    """Puts tensors into files in their order; returns the number of files."""
    files, used = 0, 0
    for target in targets:
        if used and used + target.bytes > max_shard_bytes:
            files, used = files + 1, 0
        target.file = files
        used += target.bytes
    return files + 1


def _read_file(path: str, found: dict[str, Stored], aliases: dict[str, str]) -> None:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"read {path}: no safetensors file (got a header of {length} bytes in {size})")
        header = _json(file.read(length), f"read {path}: its header")
    for fqn, item in header.items():
        if fqn == "__metadata__":
            if not isinstance(item, dict) or not all(isinstance(value, str) for value in item.values()):
                raise ValueError(f"read {path}: its metadata is no map of texts")
            aliases.update({k: v for k, v in item.items() if k != "format"})
            continue
        found[fqn] = _stored(path, fqn, item, 8 + length, size)


def _json(text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object (got {type(value).__name__})")
    return value


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(count) is int and 0 <= count < 2**63 for count in value)


def _stored(path: str, fqn: str, item: Any, start: int, size: int) -> Stored:
    """A tensor as the header of the file has it, whose bytes are all there. ``start``: of tensors in the file."""
    what = f'read {path}: "{fqn}"'
    if not isinstance(item, dict):
        raise ValueError(f"{what} is no tensor (got {type(item).__name__})")
    shape: Any = item.get("shape")
    offsets: Any = item.get("data_offsets")
    dtype: Any = item.get("dtype")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{what} has an unknown dtype (got {dtype!r})")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{what} is malformed (got shape {shape!r}, data_offsets {offsets!r})")
    begin, end = offsets
    want = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != want or start + end > size:
        raise ValueError(f"{what} does not fit (got bytes {begin} to {end} of {size - start}, want {want} bytes)")
    return Stored(path, tuple(shape), _DTYPES[dtype], start + begin)


def read_directory(directory: str) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns tensors by name, and further names that the files' metadata give to some. A path of one file is allowed too."""
    found: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    if os.path.isfile(directory):
        _read_file(directory, found, aliases)
        return found, aliases
    index = os.path.join(directory, INDEX)
    if os.path.exists(index):
        with open(index, "rb") as file:
            weight_map = _json(file.read(), f"read {index}: it").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f'read {index}: its "weight_map" is no map of tensors to files')
        for name in sorted(set(weight_map.values())):
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise ValueError(f'read {index}: a file outside of the directory (got "{name}")')
            _read_file(os.path.join(directory, name), found, aliases)
        missing = [fqn for fqn in weight_map if fqn not in found]
        if missing:
            raise ValueError(f'read {index}: {len(missing)} tensors are in none of its files; e.g. "{missing[0]}"')
        return {fqn: found[fqn] for fqn in weight_map}, aliases
    single = os.path.join(directory, SINGLE)
    if not os.path.exists(single):
        raise FileNotFoundError(f"read {directory}: neither {INDEX} nor {SINGLE} is there")
    _read_file(single, found, aliases)
    return found, aliases
