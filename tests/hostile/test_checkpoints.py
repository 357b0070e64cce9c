# SPDX-License-Identifier: Apache-2.0
"""A checkpoint or a cache entry that carries code, or leads elsewhere: checksums are right, and nothing of it runs."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from conversion.cache import CacheEntry, cached_mcore, check_entry, read_entry
from conversion.files.manifest import MANIFEST, Manifest, file_names, file_record, read_manifest, write_manifest
from mrl.config.schema.run import CheckpointingConfig
from mrl.store.checkpoints import CheckpointStore
from tests import models
from tests.hostile import checkpoint_ranks
from tests.stack.policy import policy_ranks
from tests.stack.ranks import RankPool

WEIGHT = "decoder.final_norm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
SHARD = "__0_0.distcp"


class Code:
    """Unpickles by running code that writes a marker file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (f"open({str(self._marker)!r}, 'w').close()",)


def metadata_is_code(folder: Path, code: Code) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(code))


def metadata_holds_code(folder: Path, code: Code) -> None:
    metadata = read(folder)
    metadata.planner_data = {"a": code}
    write(folder, metadata)


def common_holds_code(folder: Path, code: Code) -> None:
    torch.save({"iteration": code}, folder / "common.pt")


def common_is_an_old_pickle_with_code(folder: Path, code: Code) -> None:
    torch.save({"iteration": code}, folder / "common.pt", _use_new_zipfile_serialization=False)


def weight_holds_code(folder: Path, code: Code) -> None:
    metadata = read(folder)
    place_bytes(folder, metadata, WEIGHT, saved(code))
    write(folder, metadata)


def weight_is_bytes_with_code(folder: Path, code: Code) -> None:
    # torch reads bytes with weights_only=False. With a size of their own they look like a tensor, whose shape may be
    # another one.
    metadata = read(folder)
    entry = metadata.state_dict_metadata[EMBEDDING]
    assert isinstance(entry, TensorStorageMetadata)
    fake = BytesStorageMetadata()
    vars(fake)["size"] = entry.size
    metadata.state_dict_metadata[EMBEDDING] = fake
    place_bytes(folder, metadata, EMBEDDING, saved(code), index=MetadataIndex(EMBEDDING))
    write(folder, metadata)


def chunk_is_elsewhere(folder: Path, code: Code) -> None:
    move_chunk(folder, "../../outside.distcp")


def chunk_is_at_an_absolute_path(folder: Path, code: Code) -> None:
    move_chunk(folder, str(folder.parent.parent / "outside.distcp"))


def metadata_is_a_fifo(folder: Path, code: Code) -> None:
    replace_by_fifo(folder / ".metadata")


def common_is_a_fifo(folder: Path, code: Code) -> None:
    replace_by_fifo(folder / "common.pt")


def shard_is_a_fifo(folder: Path, code: Code) -> None:
    replace_by_fifo(folder / SHARD)


def shape_of_many_dimensions(folder: Path, code: Code) -> None:
    metadata = read(folder)
    entry = metadata.state_dict_metadata[WEIGHT]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = torch.Size([1] * 10**6)
    write(folder, metadata)


def offset_is_no_number(folder: Path, code: Code) -> None:
    metadata = read(folder)
    assert metadata.storage_data is not None
    for info in metadata.storage_data.values():
        info.offset = -5
    write(folder, metadata)


def metadata_is_cut_off(folder: Path, code: Code) -> None:
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[: len(content) // 2])


ATTACKS: dict[Callable[[Path, Code], None], str] = {
    metadata_is_code: r"/\.metadata is a pickle that asks for builtins\.exec",
    metadata_holds_code: r"/\.metadata is a pickle that asks for builtins\.exec",
    common_holds_code: r"/common\.pt is .*no plain data",
    common_is_an_old_pickle_with_code: r"/common\.pt is .*no plain data",
    weight_holds_code: rf"{WEIGHT} cannot be read: .*not a plain tensor",
    weight_is_bytes_with_code: rf"has no tensor {EMBEDDING}",
    chunk_is_elsewhere: rf"places {WEIGHT} in \.\./\.\./outside\.distcp, outside of the folder",
    chunk_is_at_an_absolute_path: rf"places {WEIGHT} in /.*/outside\.distcp, outside of the folder",
    metadata_is_a_fifo: r"/\.metadata is a FIFO, not a file",
    common_is_a_fifo: r"/common\.pt is a FIFO, not a file",
    shard_is_a_fifo: r"\.distcp is a FIFO, not a file",
    shape_of_many_dimensions: r"\.metadata describes no tensors",
    offset_is_no_number: r"\.metadata places .* at offsets that are no numbers",
    metadata_is_cut_off: r"/\.metadata is damaged",
}
CARRIES_CODE = [attack for attack in ATTACKS if "code" in attack.__name__]


@dataclass
class Outcomes:
    """Outcomes of every hostile checkpoint."""

    is_honest_loaded: bool
    markers: dict[tuple[str, str], Path]
    messages: dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """A real policy on one rank resumes from, and starts from, a copy of an honest checkpoint for each attack."""
    base = tmp_path_factory.mktemp("hostile")
    model, pool = models.save_nemotron_h(base / "model"), RankPool(1)
    config = policy_ranks.run_config(model, "one")
    places: dict[tuple[str, str], Path] = {}
    try:
        pool.run(checkpoint_ranks.save_one, config, base / "weights", world_size=1)
        mcore = cached_mcore(model, base / "cache")
        for attack in ATTACKS:
            resumed, cached = (
                base / f"run_{attack.__name__}" / "step_1",
                base / f"cache_{attack.__name__}" / "entries" / "key",
            )
            shutil.copytree(base / "weights", resumed / "policy" / "weights")
            shutil.copytree(mcore.parent, cached)
            for kind, weights in (("resume", resumed / "policy" / "weights"), ("cache", cached / "mcore")):
                place = places[kind, attack.__name__] = weights
                shutil.copy(weights / "iter_0000000" / SHARD, weights.parent / "outside.distcp")
                attack(weights / "iter_0000000", Code(base / f"ran_{kind}_{attack.__name__}"))
                (seal_step if kind == "resume" else seal_entry)(place)
        by_kind = [[place for (kind, _), place in places.items() if kind == wanted] for wanted in ("resume", "cache")]
        ((is_loaded, said),) = pool.run(
            checkpoint_ranks.load_all, config, base / "weights", *by_kind, world_size=1, timeout_s=300
        )
    finally:
        pool.close()
    messages = dict(zip([*by_kind[0], *by_kind[1]], said, strict=True))
    markers = {key: base / f"ran_{key[0]}_{key[1]}" for key in places}
    return Outcomes(is_loaded, markers, {key: messages[place] for key, place in places.items()})


def test_the_honest_checkpoint_loads(outcomes: Outcomes):
    assert outcomes.is_honest_loaded


@pytest.mark.attack("a checkpoint carries code")
@pytest.mark.parametrize("kind", ["resume", "cache"])
@pytest.mark.parametrize("attack", CARRIES_CODE, ids=lambda attack: attack.__name__)
def test_code_in_a_checkpoint_does_not_run(outcomes: Outcomes, attack: Callable[[Path, Code], None], kind: str):
    assert not outcomes.markers[kind, attack.__name__].exists()
    assert_refused(outcomes, attack, kind)


@pytest.mark.attack("a file is not what its name says")
@pytest.mark.parametrize("kind", ["resume", "cache"])
@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack not in CARRIES_CODE], ids=lambda attack: attack.__name__
)
def test_a_checkpoint_that_leads_elsewhere_is_refused_at_once(
    outcomes: Outcomes, attack: Callable[[Path, Code], None], kind: str
):
    assert_refused(outcomes, attack, kind)


def assert_refused(outcomes: Outcomes, attack: Callable[[Path, Code], None], kind: str) -> None:
    message = outcomes.messages[kind, attack.__name__]
    assert message.startswith(("ValueError: ", "RefusedPickle: "))
    pytest.raises(ValueError, raise_, message).match(ATTACKS[attack])


def raise_(message: str) -> None:
    raise ValueError(message)


def read(folder: Path) -> Metadata:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    return metadata


def write(folder: Path, metadata: Metadata) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def place_bytes(folder: Path, metadata: Metadata, key: str, content: bytes, index: MetadataIndex | None = None) -> None:
    """Appends `content` to a file, and lets the metadata find `key` there."""
    assert metadata.storage_data is not None
    with (folder / SHARD).open("ab") as file:
        start = file.seek(0, os.SEEK_END)
        file.write(content)
    for other in [other for other in metadata.storage_data if other.fqn == key]:
        metadata.storage_data[other] = _StorageInfo(SHARD, start, len(content))
    if index is not None:
        metadata.storage_data[index] = _StorageInfo(SHARD, start, len(content))


def move_chunk(folder: Path, path: str) -> None:
    metadata = read(folder)
    assert metadata.storage_data is not None
    for index, info in metadata.storage_data.items():
        if index.fqn == WEIGHT:
            moved = copy.copy(info)
            moved.relative_path = path
            metadata.storage_data[index] = moved
    write(folder, metadata)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def seal_step(weights: Path) -> None:
    """Manifest and marker of a step folder, so that a resuming run takes it for complete."""
    step = weights.parent.parent
    files = {str(path.relative_to(step)): path for path in step.rglob("*") if path.is_file()}
    manifest = {
        name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in files.items()
    }
    (step / "manifest.json").write_text(json.dumps(manifest))
    (step / "COMPLETE").write_text(hashlib.sha256((step / "manifest.json").read_bytes()).hexdigest())
    newest = CheckpointStore(step.parent, CheckpointingConfig()).newest()
    assert newest is not None and newest.weights == weights


def seal_entry(folder: Path) -> None:
    """Manifest and marker of a cache entry, so that its checksums are right."""
    old, entry = read_manifest(folder), read_entry(folder.parent)
    assert isinstance(entry, CacheEntry)
    write_manifest(
        folder, Manifest(old.source, old.tensors, {name: file_record(folder / name) for name in file_names(folder)})
    )
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    (folder.parent / "entry.json").write_text(json.dumps(vars(entry) | {"manifest_sha256": digest}))
    check_entry(folder)
