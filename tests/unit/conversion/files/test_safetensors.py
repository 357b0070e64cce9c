# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: boxes, shards, and folders that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.boxes import Box, Layout, Piece, Slot, SlotLayout, lengths
from conversion.files.hf_folder import INDEX_FILE, stored_tensors
from conversion.files.hf_weights import check_tensors
from conversion.files.manifest import FINISHED_SUFFIX
from conversion.files.safetensors import SafetensorsFolder, fill_layout, write_safetensors
from tests.reading import read_layout
from tests.unit.conversion.memory import InMemory

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(6, 4),
    "b": torch.arange(6, dtype=torch.bfloat16),
    "c": torch.arange(8, dtype=torch.float32).reshape(2, 1, 4),
}


def read_box(source: SafetensorsFolder, name: str, box: Box) -> torch.Tensor:
    """A box in its stored dtype."""
    tensor = torch.empty(lengths(box), dtype=source.dtype(name))
    source.read_into(name, box, tensor)
    return tensor


@pytest.fixture(params=[10**9, 64], ids=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_safetensors(tmp_path, InMemory(TENSORS), list(TENSORS), max_shard_bytes=request.param)
    return tmp_path


def check(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    check_tensors(folder, {name: tensor for name, (_, tensor) in stored_tensors(folder).items()}, shapes)


def test_what_was_written_is_read(folder: Path):
    with SafetensorsFolder(folder) as source:
        for name, tensor in TENSORS.items():
            assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(read_box(source, "a", ((1, 3), (2, 4))), TENSORS["a"][1:3, 2:4])
        assert torch.equal(read_box(source, "b", ((5, 6),)), TENSORS["b"][5:])
    check(folder, {name: tuple(tensor.shape) for name, tensor in TENSORS.items()})


def test_shards_are_named_and_indexed_as_transformers_does(tmp_path: Path):
    write_safetensors(tmp_path, InMemory(TENSORS), list(TENSORS), max_shard_bytes=64)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index == {"metadata": {"total_size": 140}, "weight_map": {"a": files[0], "b": files[1], "c": files[1]}}
    assert {path.name for path in tmp_path.iterdir() if path.suffix != FINISHED_SUFFIX} == {*files, INDEX_FILE}
    assert load_file(tmp_path / files[0]).keys() == {"a"}


def test_a_layout_is_filled_cast_transformed_and_padded(folder: Path):
    layout: Layout = {
        Slot("joined"): SlotLayout(
            (4, 4), "bfloat16", (Piece("a", ((2, 4), (0, 4)), ((0, 2), (0, 4))),), padding=(((2, 4), (0, 4)),)
        ),
        Slot("stacked"): SlotLayout(
            (2, 6), "float32", (Piece("b", ((0, 6),), ((1, 2), (0, 6)), "neg_exp"),), padding=(((0, 1), (0, 6)),)
        ),
    }
    tensors = {
        slot: torch.full(content.shape, 7, dtype=getattr(torch, content.dtype)) for slot, content in layout.items()
    }
    fill_layout(folder, layout, tensors)
    assert torch.equal(
        tensors[Slot("joined")], torch.cat([TENSORS["a"][2:4].bfloat16(), torch.zeros(2, 4, dtype=torch.bfloat16)])
    )
    assert torch.equal(tensors[Slot("stacked")], torch.stack([torch.zeros(6), -torch.exp(TENSORS["b"].float())]))
    fresh = read_layout(folder, layout)
    assert all(torch.equal(fresh[slot], tensors[slot]) for slot in layout)


def test_folders_that_do_not_fit_are_refused(folder: Path):
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    with SafetensorsFolder(folder) as source:
        with pytest.raises(ValueError, match="missing: d; unknown to this model_type: c"):
            check(folder, {"a": (6, 4), "b": (6,), "d": (1,)})
        with pytest.raises(ValueError, match=r"b has shape \(6,\); by config.json it must be \(7,\)"):
            check(folder, shapes | {"b": (7,)})
        with pytest.raises(ValueError, match="there is no tensor d"):
            read_box(source, "d", ((0, 1),))
        with pytest.raises(ValueError, match=r"a has shape \(6, 4\), but box \(\(0, 7\), \(0, 4\)\) of it is needed"):
            read_box(source, "a", ((0, 7), (0, 4)))


def test_folders_without_weights_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="name a Hugging Face folder"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="model.safetensors is no safetensors file, or an incomplete one"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX_FILE).write_text("{")
    with pytest.raises(ValueError, match="name a Hugging Face folder"):
        SafetensorsFolder(tmp_path)


def shards(folder: Path, weight_map: dict[str, str], **files: dict[str, torch.Tensor]) -> Path:
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file}.safetensors")
    (folder / INDEX_FILE).write_text(
        json.dumps({"weight_map": {name: f"{file}.safetensors" for name, file in weight_map.items()}})
    )
    return folder


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path):
    first, second = {"a": torch.zeros(4), "b": torch.ones(4)}, {"b": torch.full((4,), 2.0), "c": torch.full((4,), 3.0)}
    shards(tmp_path, {"a": "x", "b": "x", "c": "y"}, x=first, y=second)
    for read in (stored_tensors, SafetensorsFolder):
        with pytest.raises(ValueError, match=f"y.safetensors holds tensors that {INDEX_FILE} does not place there: b$"):
            read(tmp_path)


def test_a_tensor_that_only_a_shard_knows_is_refused(tmp_path: Path):
    shards(tmp_path, {"a": "x"}, x={"a": torch.zeros(4), "stray": torch.zeros(1)})
    with pytest.raises(ValueError, match="does not place there: stray$"):
        stored_tensors(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path):
    write_safetensors(tmp_path, InMemory(TENSORS), list(TENSORS), max_shard_bytes=64)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors cannot be read: .*; download it again"):
        SafetensorsFolder(tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path):
    save_file({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with (
        SafetensorsFolder(tmp_path) as source,
        pytest.raises(ValueError, match="a has dtype F8_E4M3; only unquantised"),
    ):
        source.dtype("a")
