# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folder to Megatron checkpoint and back, for every family and cut, and what tells two folders apart."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from conversion.boxes import tiling_fault
from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf, differences, faults_against_manifest
from conversion.families.common import MegatronParallel
from conversion.families.registry import FAMILIES, family
from conversion.files.manifest import check_files, read_manifest
from conversion.files.reading import file_state
from conversion.files.torch_dist_writer import files_of_ranks
from tests.reading import read_canonical
from tests.unit.conversion.hf_folders import tiny_config, write_folder

# Files that each layout gives: its ranks with different coordinates.
CUTS = {
    "one file": (MegatronParallel(), 1),
    "tp2 pp2 ep2": (MegatronParallel(tp=2, pp=2, ep=2), 4),
    "tp2 ep4 etp2": (MegatronParallel(tp=2, ep=4, etp=2), 8),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face folder of each family. 264 tokens, so that vocabularies are padded."""
    root = tmp_path_factory.mktemp("families")
    return {name: write_folder(root / name, tiny_config(name)) for name in FAMILIES}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_there_and_back_no_bit_changes_and_cuts_change_no_checksum(folders, tmp_path: Path, model_type: str):
    hf, checksums = folders[model_type], []
    for cut, (parallel, num_files) in CUTS.items():
        convert_hf_to_mcore(hf, tmp_path / cut, parallel=parallel)
        manifest = read_manifest(tmp_path / cut)
        checksums.append(manifest.tensors)
        assert len([name for name in manifest.files if name.endswith(".distcp")]) == num_files, cut
        # Reads every tensor, whose checksum is that of the way back.
        assert list(faults_against_manifest(tmp_path / cut)) == [], cut
    convert_mcore_to_hf(tmp_path / cut, tmp_path / "back")
    before, after = read_canonical(hf), read_canonical(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert checksums == [read_manifest(tmp_path / "back").tensors] * len(CUTS)


def test_a_rank_reads_its_own_file_and_what_it_shares(folders):
    hf_config = tiny_config("nemotron_h")
    model, parallel = family(hf_config), MegatronParallel(tp=2, pp=2, ep=2)
    layout = model.torch_dist_layout(hf_config, "float32")
    files = files_of_ranks(model, hf_config, parallel, layout, 1 << 30)
    for slot, content in layout.items():
        boxes = [
            tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.content.shape, strict=True))
            for chunks in files
            for chunk in chunks
            if chunk.key == slot.name
        ]
        assert tiling_fault(content.shape, boxes) is None, slot
    # Both stages have tp * ep ranks here, and the second rank's half of a projection lies in its own file.
    (first, second, *_) = ({chunk.key: chunk for chunk in chunks} for chunks in files)
    key = "decoder.layers.0.mixer.out_proj.weight"
    assert first[key].offsets == (0, 0) and second[key].offsets == (0, layout_columns(layout, key) // 2)
    expert = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
    of_file = [[chunk.offsets[0] for chunk in chunks if chunk.key == expert] for chunks in files]
    assert of_file == [[0, 1, 2, 3], [4, 5, 6, 7], [], []]


def layout_columns(layout, key: str) -> int:
    (content,) = [content for slot, content in layout.items() if slot.name == key]
    return content.shape[1]


def test_torch_reads_what_was_written(folders, tmp_path: Path):
    """Uses torch's own reader, with its own reading of the metadata."""
    convert_hf_to_mcore(folders["qwen3_moe"], tmp_path / "mcore", parallel=MegatronParallel(tp=2, ep=2))
    iteration = tmp_path / "mcore" / "iter_0000000"
    metadata = FileSystemReader(iteration).read_metadata()
    key = "decoder.layers.0.mlp.experts.experts.linear_fc2.weight"
    target = {key: torch.zeros(metadata.state_dict_metadata[key].size, dtype=torch.bfloat16)}  # type: ignore[union-attr]  # a tensor
    dcp.load(target, storage_reader=FileSystemReader(iteration), no_dist=True)
    before = load_file(folders["qwen3_moe"] / "model.safetensors")
    expected = torch.stack([before[f"model.layers.0.mlp.experts.{index}.down_proj.weight"] for index in range(8)])
    assert torch.equal(target[key], expected)


@pytest.mark.parametrize(("dtype", "kept"), [("float32", True), ("bfloat16", False)])
def test_one_dtype_for_all(folders, tmp_path: Path, dtype: str, kept: bool):
    """float32 holds every value of the source; bfloat16 rounds what holders round, which router biases are not."""
    hf = folders["nemotron_h"]
    convert_hf_to_mcore(hf, tmp_path / "mcore", dtype=dtype)
    records = read_manifest(tmp_path / "mcore").tensors
    biases = {name for name in records if "e_score_correction_bias" in name}
    assert biases and {records[name].dtype for name in biases} == {"float32"}
    assert {record.dtype for name, record in records.items() if name not in biases} == {dtype}
    assert list(faults_against_manifest(tmp_path / "mcore")) == []
    convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = load_file(hf / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(after[name], tensor.to(after[name].dtype)) for name, tensor in before.items())
    assert (after["lm_head.weight"].dtype == torch.float32) == kept
    # From float32 down again, on the way back.
    convert_hf_to_mcore(hf, tmp_path / "wide", dtype="float32")
    convert_mcore_to_hf(tmp_path / "wide", tmp_path / "narrow", dtype="bfloat16")
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    assert all(
        torch.equal(narrow[name], tensor if name in biases else tensor.bfloat16()) for name, tensor in before.items()
    )


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder and the Megatron checkpoint of it, in two files."""
    out = tmp_path_factory.mktemp("pair") / "mcore"
    convert_hf_to_mcore(folders["qwen3_moe"], out, parallel=MegatronParallel(tp=2))
    return folders["qwen3_moe"], out


def test_equal_folders_have_no_differences(pair: tuple[Path, Path]):
    hf, mcore = pair
    assert (
        list(differences(hf, mcore))
        == list(differences(mcore, hf))
        == list(differences(mcore, mcore / "iter_0000000"))
        == []
    )


def test_differences_are_named(pair: tuple[Path, Path], tmp_path: Path):
    hf, mcore = pair
    other = Path(shutil.copytree(hf, tmp_path / "other"))
    tensors = load_file(hf / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 5] += 2
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"].float()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].clone()
    # The same number, another bit.
    tensors["lm_head.weight"][0, 0] = 0
    tensors["stray"] = tensors.pop("model.layers.0.input_layernorm.weight")
    save_file(tensors, other / "model.safetensors")
    found = {line.split(": ")[0]: line.split(": ", 1)[1] for line in differences(mcore, other)}
    assert found == {
        "model.layers.0.input_layernorm.weight": f"only in {mcore}",
        "stray": f"only in {other}",
        "model.embed_tokens.weight": "1 of 16896 values differ, by at most 2",
        "model.layers.1.self_attn.q_proj.weight": "dtype bfloat16 and float32",
        "model.norm.weight": "shape (64,) and (5,)",
        "lm_head.weight": found["lm_head.weight"],
    }
    assert found["lm_head.weight"].startswith("1 of 16896 values differ")


def test_zeros_of_different_sign_differ(pair: tuple[Path, Path], tmp_path: Path):
    folders = []
    for sign in (1.0, -1.0):
        folder = Path(shutil.copytree(pair[0], tmp_path / f"zero{sign}"))
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"][0, 0] = sign * 0.0
        save_file(tensors, folder / "model.safetensors")
        folders.append(folder)
    assert list(differences(*folders)) == ["lm_head.weight: 1 of 16896 values differ, by at most 0"]


def test_a_wrong_rule_is_found_by_verify_although_every_file_is_as_it_was_written(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch
):
    """Checksums of tensors come from the source by another path than what is written."""
    import conversion.files.torch_dist_writer as out

    real = out.fill_from

    def swapped(tensor, content, source):
        real(tensor, content, source)
        if "self_attn.q_proj" in content.pieces[0].name:
            tensor.copy_(tensor.flip(0))

    monkeypatch.setattr(out, "fill_from", swapped)
    convert_hf_to_mcore(pair[0], tmp_path / "mcore")
    faults = list(faults_against_manifest(tmp_path / "mcore"))
    assert faults and all(
        "self_attn" in fault and "not those of the model that was converted" in fault for fault in faults
    )
    with pytest.raises(ValueError, match="not the values that were written"):
        convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def positions(size: int) -> set[int]:
    """Some bytes of a file: its ends, and others all over it."""
    return {0, size - 1} | {size * part // 9 for part in range(1, 9)}


def test_a_flipped_byte_is_found_wherever_it_is(pair: tuple[Path, Path], tmp_path: Path):
    checkpoint = Path(shutil.copytree(pair[1], tmp_path / "mcore"))
    names = [*read_manifest(checkpoint).files, "manifest.json"]
    for name in names:
        content = (checkpoint / name).read_bytes()
        for position in positions(len(content)):
            (checkpoint / name).write_bytes(
                content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
            )
            with pytest.raises(ValueError, match="checksum differs|missing or damaged"):
                check_files(checkpoint, names[:-1])
            try:
                faults = list(faults_against_manifest(checkpoint))
            except ValueError as error:
                faults = [str(error)]
            assert faults, (name, position)
        (checkpoint / name).write_bytes(content)
    assert list(faults_against_manifest(checkpoint)) == []


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_a_flipped_byte_of_a_weight_is_found_by_the_way_back(
    pair: tuple[Path, Path], tmp_path: Path, dtype: str | None
):
    checkpoint = Path(shutil.copytree(pair[1], tmp_path / "mcore"))
    data = checkpoint / "iter_0000000" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(
        ValueError, match="not the values that were written" if dtype is None else "__0_0.distcp: its checksum differs"
    ):
        convert_mcore_to_hf(checkpoint, tmp_path / "back", dtype=dtype)
    assert {path.name for path in tmp_path.iterdir()} == {"mcore"}


@pytest.mark.parametrize("position", [1, 2])
def test_a_flipped_byte_of_a_weight_is_found_without_a_manifest(pair: tuple[Path, Path], tmp_path: Path, position: int):
    """Covers checkpoints that others wrote."""
    checkpoint = Path(shutil.copytree(pair[1], tmp_path / "mcore", ignore=shutil.ignore_patterns("manifest.json")))
    data = checkpoint / "iter_0000000" / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) * position // 3] ^= 4
    data.write_bytes(content)
    with pytest.raises(ValueError, match="__1_0.distcp at byte .* is damaged: archive/data/0 does not have its CRC-32"):
        convert_mcore_to_hf(checkpoint, tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"mcore"}


def test_what_was_written_is_kept_when_the_disk_of_the_source_fails(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch
):
    checkpoint = Path(shutil.copytree(pair[1], tmp_path / "mcore"))
    real, reads = os.preadv, []

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(checkpoint)):
            reads.append(offset)
        if len(reads) == 8:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        convert_mcore_to_hf(checkpoint, tmp_path / "back")
    monkeypatch.undo()
    assert [path.name.split("@")[0] for path in sorted(tmp_path.iterdir())] == [".back.partial", "mcore"]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_a_flipped_byte_of_an_export_is_found_when_it_is_converted_again(
    pair: tuple[Path, Path], tmp_path: Path, dtype: str | None
):
    convert_mcore_to_hf(pair[1], tmp_path / "hf")
    data = tmp_path / "hf" / "model.safetensors"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    with pytest.raises(
        ValueError,
        match="not the values that were written" if dtype is None else "model.safetensors: its checksum differs",
    ):
        convert_hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", dtype=dtype)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_replaced_source_is_told_apart_although_its_times_are_kept(tmp_path: Path):
    """Replaces the source like `cp -p`: files made from the old one must not be continued."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("old")
    before = file_state(first)
    assert file_state(first) == before
    second.write_text("new")
    shutil.copystat(first, second)
    second.rename(first)
    assert first.stat().st_mtime_ns == before[1] and file_state(first) != before


def test_a_source_that_changes_while_it_is_converted_is_refused(tmp_path: Path):
    model = write_folder(tmp_path / "model", tiny_config("nemotron_h"))

    def change(done: int, total: int, kept: int) -> None:
        (model / "config.json").touch()

    with pytest.raises(ValueError, match=f"{model} changed while it was converted"):
        convert_hf_to_mcore(model, tmp_path / "mcore", progress=change)
    assert os.listdir(tmp_path) == ["model"]


def test_missing_and_added_files_are_found(pair: tuple[Path, Path], tmp_path: Path):
    checkpoint = Path(shutil.copytree(pair[1], tmp_path / "mcore"))
    (checkpoint / "stray").write_text("")
    (checkpoint / "iter_0000000" / "common.pt").unlink()
    assert list(faults_against_manifest(checkpoint)) == [
        "stray: not in the manifest",
        "iter_0000000/common.pt: missing",
    ]
    with pytest.raises(ValueError, match="common.pt: missing"):
        check_files(checkpoint, ["iter_0000000/common.pt"])


@pytest.mark.parametrize(
    ("model_type", "held"),
    [
        ("gpt_oss", "all gates of an expert above all its up projections"),
        ("qwen3_5_moe_text", "the norm in a delta net less one"),
    ],
)
@pytest.mark.parametrize(
    "settings", [None, "model:\n  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider\n"]
)
def test_what_other_trainers_hold_otherwise_is_refused(
    folders, tmp_path: Path, model_type: str, held: str, settings: str | None
):
    """Megatron-LM writes no run_config.yaml, Megatron-Bridge its own."""
    convert_hf_to_mcore(folders[model_type], tmp_path / "mcore")
    (tmp_path / "mcore" / "manifest.json").unlink()
    path = tmp_path / "mcore" / "iter_0000000" / "run_config.yaml"
    path.unlink() if settings is None else path.write_text(settings)
    with pytest.raises(ValueError, match=f"other trainers than mrl wrote it, and they hold {held}"):
        convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
