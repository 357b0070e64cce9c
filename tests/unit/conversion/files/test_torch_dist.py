# SPDX-License-Identifier: Apache-2.0
"""torch_dist checkpoints, written and read without Megatron; tests/stack loads them with it."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import save as save_checkpoint
from torch.distributed.checkpoint.metadata import MetadataIndex

from conversion.boxes import Layout, Piece, Slot, SlotLayout, full
from conversion.families.registry import family
from conversion.files import torch_dist
from conversion.files.torch_dist import CanonicalTensors, TorchDistFolder
from conversion.files.torch_dist_writer import Chunk, files_of_size, restricted, write_torch_dist
from conversion.tensors import byte_view, read_whole
from tests.tiny import TINY_CONFIG as TINY
from tests.unit.conversion.memory import InMemory

FAMILY = family(TINY)


def random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in FAMILY.canonical(TINY).items()}


def written(folder: Path, layout: Layout, canonical: dict[str, Tensor]) -> Path:
    write_torch_dist(folder, layout, files_of_size(layout, 1 << 17, 1 << 30), InMemory(canonical))
    return folder


def canonical_tensors(source: TorchDistFolder, layout: Layout) -> dict[str, Tensor]:
    tensors = CanonicalTensors(source, layout)
    read = {name: torch.empty(tensors.shape(name), dtype=tensors.dtype(name)) for name in tensors.names}
    for name, tensor in read.items():
        tensors.read_into(name, full(tensor.shape), tensor)
    return read


@pytest.mark.parametrize("padded_vocabulary", [None, 264, 512])
def test_what_was_written_is_read_bit_for_bit(tmp_path: Path, padded_vocabulary: int | None):
    canonical = random_tensors()
    layout = FAMILY.torch_dist_layout(TINY, "float32", padded_vocabulary)
    source = TorchDistFolder(written(tmp_path, layout, canonical))
    assert source.shape("output_layer.weight") == (padded_vocabulary or 384, 64)
    read = canonical_tensors(source, layout)
    assert list(read) == list(FAMILY.canonical(TINY))
    for name, tensor in canonical.items():
        assert torch.equal(read[name], tensor)
    assert not read_whole(source, "output_layer.weight")[264:].any()


def test_experts_are_stored_one_by_one_and_extra_state_is_there(tmp_path: Path):
    layout = FAMILY.torch_dist_layout(TINY, "float32")
    written(tmp_path, layout, random_tensors())
    entries = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    chunks = entries["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].chunks  # type: ignore[union-attr]  # a tensor
    assert [tuple(chunk.offsets) for chunk in chunks] == [(index, 0, 0) for index in range(8)]
    assert len(entries["decoder.layers.0.mixer.out_proj.weight"].chunks) == 1  # type: ignore[union-attr]  # a tensor
    assert {
        key for key in entries if key.startswith("decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state")
    } == {f"decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_{index}_8" for index in range(8)}
    modules = ("decoder.layers.0.mixer.in_proj", "decoder.layers.1.pre_mlp_layernorm", "decoder.final_norm")
    assert {f"{module}._extra_state/shard_0_1" for module in modules} <= entries.keys()
    assert not [
        key for key in entries if "router._extra" in key or "conv1d._extra" in key or "mixer.norm._extra" in key
    ]
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def simple(shape: tuple[int, ...], *names: str) -> Layout:
    return {
        Slot(f"decoder.{name}"): SlotLayout(shape, "float32", (Piece(name, full(shape), full(shape)),))
        for name in names
    }


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path):
    source = TorchDistFolder(
        written(tmp_path, simple((2, 2), "a", "b"), {"a": torch.ones(2, 2), "b": torch.ones(2, 2)})
    )
    with pytest.raises(ValueError, match="no tensor decoder.c"):
        source.check(simple((2, 2), "a", "b", "c"))
    with pytest.raises(ValueError, match="weights that the model's config does not have: decoder.b"):
        source.check(simple((2, 2), "a"))
    with pytest.raises(ValueError, match=r"decoder.a has shape \(2, 2\); by the model's config it must be \(3, 2\)"):
        source.check(simple((3, 2), "a", "b"))


def test_weights_that_the_model_has_no_place_for_are_refused_wherever_they_are(tmp_path: Path):
    """Such as the head of a model that config.json says is tied."""
    layout = simple((2, 2), "a")
    for index, stray in enumerate(("output_layer.weight", "mtp.layers.0.weight", "optimizers_own.weight")):
        more = {Slot(stray): SlotLayout((2, 2), "float32", (Piece("b", full((2, 2)), full((2, 2))),))}
        source = TorchDistFolder(
            written(new(tmp_path / str(index)), layout | more, {name: torch.ones(2, 2) for name in "ab"})
        )
        with pytest.raises(ValueError, match=f"weights that the model's config does not have: {stray}"):
            source.check(layout)


def test_training_state_is_not_looked_at(tmp_path: Path):
    keys = (
        "optimizer.state.exp_avg.decoder.a",
        "chained_0.optimizer.state.fp32_param.decoder.a",
        "chained_12.optimizer.state.x",
        "rng_state",
    )
    more = {Slot(key): SlotLayout((2, 2), "float32", (Piece("b", full((2, 2)), full((2, 2))),)) for key in keys}
    layout = simple((2, 2), "a")
    TorchDistFolder(written(tmp_path, layout | more, {name: torch.ones(2, 2) for name in "ab"})).check(layout)


def test_legacy_experts_are_refused_by_name(tmp_path: Path):
    source = TorchDistFolder(
        written(
            tmp_path, simple((2, 2), "layers.0.mlp.experts.weight1"), {"layers.0.mlp.experts.weight1": torch.ones(2, 2)}
        )
    )
    with pytest.raises(
        ValueError,
        match="decoder.layers.0.mlp.experts.weight1 has all experts of Megatron's legacy GroupedMLP in one tensor",
    ):
        source.check(simple((2, 2), "layers.0.mlp.experts.experts.linear_fc1.weight"))


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_parts_in_several_dtypes_are_refused(tmp_path: Path):
    layout = {
        Slot(f"decoder.w.{part}"): SlotLayout((1,), dtype, (Piece("w", ((index, index + 1),), ((0, 1),)),))
        for index, (part, dtype) in enumerate([("x", "float32"), ("B", "bfloat16")])
    }
    source = TorchDistFolder(written(tmp_path, layout, {"w": torch.ones(2)}))
    with pytest.raises(ValueError, match="parts of w in several dtypes"):
        canonical_tensors(source, layout)


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="not a Megatron torch_dist checkpoint, or not a complete one"):
        TorchDistFolder(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="not a Megatron torch_dist checkpoint, or not a complete one"):
        TorchDistFolder(tmp_path)


def test_a_missing_or_short_file_is_named(tmp_path: Path):
    source = TorchDistFolder(written(tmp_path, simple((64, 64), "a"), {"a": torch.ones(64, 64)}))
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:200])
    with pytest.raises(ValueError, match="decoder.a cannot be read"):
        read_whole(source, "decoder.a")
    data.unlink()
    with pytest.raises(ValueError, match="decoder.a cannot be read"):
        read_whole(source, "decoder.a")


def in_files_of_rows(folder: Path, tensor: Tensor) -> Path:
    """A checkpoint of `decoder.a` with a chunk and a file for every two rows."""
    layout = simple(tuple(tensor.shape), "a")
    (content,) = layout.values()
    boxes = [((start, start + 2), *full(tensor.shape[1:])) for start in range(0, len(tensor), 2)]
    files = [[Chunk("decoder.a", tuple(low for low, _ in box), restricted(content, box))] for box in boxes]
    write_torch_dist(folder, layout, files, InMemory({"a": tensor}))
    return folder


def test_chunks_that_overlap_and_leave_as_much_out_are_refused(tmp_path: Path):
    in_files_of_rows(tmp_path, torch.arange(4.0))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["decoder.a"].chunks[1].offsets = torch.Size([1])
    metadata.storage_data[MetadataIndex("decoder.a", torch.Size([1]))] = metadata.storage_data[
        MetadataIndex("decoder.a", torch.Size([2]))
    ]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"do not cover \(\(0, 4\),\) once: there, boxes .* overlap"):
        read_whole(TorchDistFolder(tmp_path), "decoder.a")


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_dist, "MAX_OPEN_FILES", 2)
    tensor = torch.randn(12, 3)
    source = TorchDistFolder(in_files_of_rows(tmp_path, tensor))
    for _ in range(2):
        assert torch.equal(read_whole(source, "decoder.a"), tensor)
        assert (
            len([link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link).startswith(str(tmp_path))])
            == 2
        )


def test_what_only_torch_can_read_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensor = torch.randn(8, 6)
    save_checkpoint({"decoder.a": tensor.t().contiguous().t()}, checkpoint_id=tmp_path, no_dist=True)
    real, loads = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loads.append((args, kwargs)) or real(*args, **kwargs))
    source, rows = TorchDistFolder(tmp_path), torch.empty(8, 6)
    for row in range(8):
        source.read_into("decoder.a", ((row, row + 1), (0, 6)), rows[row : row + 1])
    assert torch.equal(rows, tensor)
    assert len([options for _, options in loads if options["map_location"] == "cpu"]) == 1


TENSORS = [
    torch.randn(3, 5),
    torch.randn(7).bfloat16(),
    torch.tensor(3),
    torch.randn(1, 4, 6).half(),
    torch.arange(9, dtype=torch.int8),
    torch.randn(2, 2).double(),
]


def saved(folder: Path, tensor: Tensor) -> Path:
    """A checkpoint of `a` by torch itself; the file that holds it."""
    save_checkpoint({"a": tensor}, checkpoint_id=folder, no_dist=True)
    return folder / "__0_0.distcp"


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_what_torch_saves_is_read_in_place_and_a_flipped_bit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: Tensor
):
    data = saved(tmp_path, tensor)
    real, devices = torch.load, []
    monkeypatch.setattr(
        torch, "load", lambda *args, **kwargs: devices.append(kwargs["map_location"]) or real(*args, **kwargs)
    )
    assert torch.equal(read_whole(TorchDistFolder(tmp_path), "a"), tensor)
    assert devices == ["meta"]
    content = bytearray(data.read_bytes())
    last = content.index(bytes(byte_view(tensor))) + tensor.nbytes - 1
    content[last] ^= 1
    data.write_bytes(content)
    assert not torch.equal(read_whole(TorchDistFolder(tmp_path, verify=False), "a"), tensor)
    with pytest.raises(
        ValueError, match="a cannot be read: __0_0.distcp at byte 0 is damaged: .*/data/0 does not have its CRC-32"
    ):
        read_whole(TorchDistFolder(tmp_path), "a")


def test_content_that_would_end_behind_the_archive_is_refused(tmp_path: Path):
    data = saved(tmp_path, torch.zeros(100))
    content = bytearray(data.read_bytes())
    header = content.rindex(b"PK\x03\x04", 0, content.index(b"/data/0"))
    # How long the extra field is, after which the content begins.
    content[header + 28 : header + 30] = b"\xff\xff"
    data.write_bytes(content)
    with pytest.raises(ValueError, match="a cannot be read: .*"):
        read_whole(TorchDistFolder(tmp_path, verify=False), "a")


def test_other_orders_of_bytes_and_compressed_records_are_left_to_torch(tmp_path: Path):
    tensor = torch.randn(5)
    for name, order, compression in (
        ("big", b"big", zipfile.ZIP_STORED),
        ("deflated", b"little", zipfile.ZIP_DEFLATED),
    ):
        data = saved(tmp_path / name, tensor)
        with zipfile.ZipFile(data) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(data, "w", compression) as archive:
            for file, content in records.items():
                stored = order if file.endswith("/byteorder") else content
                archive.writestr(file, stored[::-1] if order == b"big" and file.endswith("/data/0") else stored)
        metadata = pickle.loads((tmp_path / name / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.length = data.stat().st_size
        (tmp_path / name / ".metadata").write_bytes(pickle.dumps(metadata))
        read = read_whole(TorchDistFolder(tmp_path / name), "a")
        assert torch.equal(read, tensor.flip(0) if order == b"big" else tensor)


@pytest.mark.parametrize("damage", [b"", b"PK", b"no archive at all"])
def test_what_is_no_archive_is_damaged(tmp_path: Path, damage: bytes):
    saved(tmp_path, torch.zeros(3)).write_bytes(damage)
    with pytest.raises(ValueError, match="a cannot be read: __0_0.distcp at byte 0 is damaged"):
        read_whole(TorchDistFolder(tmp_path), "a")
