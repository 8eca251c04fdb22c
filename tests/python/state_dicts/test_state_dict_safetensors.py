"""Models as directories of safetensors files: what other tools read, and back, in any world."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import run_ranks
from state_dicts import safetensors_cases, transformers_cases
from state_dicts.test_state_dict import same
from torchrun import relaunched

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """By the format's description; tensors follow each other without gaps."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    body = bytearray(data[8 + length :])
    found, end = {}, 0
    for name, item in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = item["data_offsets"]
        assert begin == end and begin % _DTYPES[item["dtype"]].itemsize == 0
        end = stop
        found[name] = torch.frombuffer(body[begin:stop], dtype=_DTYPES[item["dtype"]]).reshape(item["shape"])
    assert end == len(body)
    if importlib.util.find_spec("safetensors") is not None:  # what others read it with
        from safetensors.torch import load_file

        same(load_file(path), found)
    return found, metadata


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header: dict[str, Any] = {}
    body = b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize("edits", [True, False])
def test_directories_follow_the_format_and_load_in_another_world(edits: bool, tmp_path: Path) -> None:
    saved = run_ranks(safetensors_cases.save, 4, str(tmp_path))
    state = saved[0]["state"]
    assert saved[0]["counters"]["commits"] >= 4
    index = json.loads((tmp_path / "fp32/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 2 and files == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert sorted(p.name for p in (tmp_path / "fp32").iterdir()) == [*files, "model.safetensors.index.json"]
    found: dict[str, torch.Tensor] = {}
    for name in files:
        tensors, metadata = read(tmp_path / "fp32" / name)
        assert metadata["format"] == "pt"
        assert all(index["weight_map"][key] == name for key in tensors)
        found.update(tensors)
        if "embed.weight" in tensors:
            assert metadata["head.weight"] == "embed.weight"  # tied: stored once
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    same(found, {n: v for n, v in state.items() if n != "head.weight"})
    assert "layers.0.up.weight" in found and "bias" in found
    halves, _ = read(tmp_path / "bf16/model-00001-of-00001.safetensors")
    same(halves, {n: v.bfloat16() for n, v in found.items()})

    write(tmp_path / "less", {n: v for n, v in found.items() if n != "norm.weight"})
    write(tmp_path / "wrong", {**found, "norm.weight": torch.zeros(3)})
    for rank, out in enumerate(run_ranks(safetensors_cases.load, 3, str(tmp_path), edits)):
        for when in ("fresh", "used"):
            same(out[when], state, f"{rank} {when}")
            same(out[f"{when} bf16"], {n: v.bfloat16().float() for n, v in state.items()}, f"{rank} {when}")
            assert out[f"{when} unchanged"]
            same(out[f"{when} loss"], saved[0]["went on"][:1], tolerance=2e-6)
        assert out["missing"] == ["norm.weight"] and out["all"]
        assert '"norm.weight"' in out["errors"]["shape"] and "got [3], want [10]" in out["errors"]["shape"]
        assert '1 missing; e.g. "norm.weight"' in out["errors"]["names"]
        assert "model.safetensors is there" in out["errors"]["file"]
        assert out["used counters"]["commits"] == 2  # optimizer steps; loads are none


def test_a_save_that_dies_leaves_the_one_before(tmp_path: Path) -> None:
    for rank, out in enumerate(run_ranks(safetensors_cases.torn_save, 2, str(tmp_path))):
        plain, second, third = out["files"]
        assert (
            len(plain) > 2
            and third == plain
            and second
            == sorted(
                name.replace(".safetensors", "-b.safetensors") if name.startswith("model-") else name for name in plain
            )
        )
        *torn, last = out["read"]
        assert len(torn) == len(plain)
        for read in torn:
            same(read, out["first"], f"{rank}")
        same(last, out["last"], f"{rank}")
        assert any(not torch.equal(value, out["first"][name]) for name, value in last.items())
        assert out["counters"]["commits"] == 2


@pytest.mark.parametrize("edits", [True, False])
def test_a_load_that_fails_halfway_commits_nothing(edits: bool, tmp_path: Path) -> None:
    run = relaunched(safetensors_cases.torn_load, 2, str(tmp_path), edits, restarts=1, name=f"torn-{edits}")
    assert run.code == 0, run.log
    assert all("the disk is gone" in event["error"] for event in run.of("failed")) and len(run.of("failed")) == 2
    want = torch.load(tmp_path / "want.pt")
    for rank, out in run.results.items():
        assert out["step"] == 2 and out["counters"]["commits"] >= 3
        same(out["state"], want["before"], f"{rank}")
        same(out["loaded"], want["saved"], f"{rank}")


def test_saves_and_loads_hold_no_more_than_a_ranks_shard(tmp_path: Path) -> None:
    for out in run_ranks(safetensors_cases.memory, 2, str(tmp_path)):
        assert out["same"] and out["counters"]["commits"] >= 1
        assert out["grown"] < out["largest"] and out["peak"] < 2 * out["largest"] < out["model"] / 4


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
def test_transformers_reads_what_is_saved_here_and_the_other_way(tmp_path: Path) -> None:
    for rank, out in enumerate(run_ranks(transformers_cases.there_and_back, 2, str(tmp_path), limit_s=200)):
        source, source_loss = out["source"]
        for form in transformers_cases.FORMS:
            facts = out[form]
            saved, loss = facts["saved"]
            assert loss != facts["before"] and facts["counters"]["commits"] >= 1
            if rank == 0:
                state, their_loss, wrong, tied, kind = facts["read"]
                same(state, saved, form)
                same(their_loss, loss, form, 2e-6)
                assert not wrong and tied and kind == "LlamaForCausalLM"
            for state, loaded_loss, wrong in facts["loaded"]:
                same(state, source, form)
                same(loaded_loss, source_loss, form, 2e-6)
                assert not wrong
            (file,) = (tmp_path / f"{form} again").glob("model-*.safetensors")
            again, _ = read(file)
            same(again, {name: value for name, value in source.items() if name != "lm_head.weight"}, form)
