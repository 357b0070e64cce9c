# SPDX-License-Identifier: Apache-2.0
"""Metadata are read as plain values: a pickle can neither run anything nor change what outlives it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint import save as save_checkpoint
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.serialization import _get_layout

from conversion.files.checkpoint_metadata import CheckpointMetadata, PickledRecord, RefusedPickle, StoredChunk, unpickle


class Evil:
    """Unpickles by running code."""

    def __reduce__(self):
        return eval, ("__import__('os').system('touch /tmp/it_ran')",)


def test_a_pickle_that_runs_something_is_refused_by_the_name_of_what_it_asks_for():
    with pytest.raises(RefusedPickle, match=r"it is a pickle that asks for builtins\.eval"):
        unpickle(pickle.dumps(Evil()), "it")
    with pytest.raises(RefusedPickle, match="asks for torch.distributed.checkpoint.metadata.Metadata.__init__"):
        unpickle(
            b"\x80\x04\x8c\x28torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93.".replace(
                b"\x28t", b"\x25t"
            ),
            "it",
        )


@pytest.mark.parametrize("data", [b"\x80\x04.", b"", b"no pickle"])
def test_a_damaged_pickle_is_named(data: bytes):
    with pytest.raises(ValueError, match="it is damaged"):
        unpickle(data, "it")


@pytest.mark.parametrize(
    "target",
    [
        b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n",
        b"cpathlib\nPath\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nfloat32\n",
    ],
)
@pytest.mark.parametrize("state", [b"N}Vload_id\nVevil\ns\x86", b"}Vload_id\nVevil\ns"], ids=["slots", "attributes"])
def test_a_pickle_cannot_change_what_outlives_it(target: bytes, state: bytes):
    """Uses the opcode that gives an object its state, with a class or a function in the place of the object."""
    with pytest.raises(ValueError, match="it is damaged"):
        unpickle(b"\x80\x02" + target + state + b"b.", "it")
    assert StorageMeta().load_id is None
    assert not any(hasattr(what, "load_id") for what in (Path, _get_layout, PickledRecord))


def test_objects_of_torch_become_records_without_methods():
    metadata = Metadata(
        {}, planner_data={"a": torch.Size([2])}, storage_meta=StorageMeta(load_id="me", checkpoint_id=Path("/a"))
    )
    found = unpickle(pickle.dumps(metadata), "it")
    assert isinstance(found, PickledRecord) and type(found).__name__ == "Metadata"
    assert vars(found)["planner_data"] == {"a": torch.Size([2])}
    assert vars(vars(found)["storage_meta"])["load_id"] == "me"


def test_the_plans_that_megatrons_own_saves_keep_are_passed_over(tmp_path: Path):
    state = {"a": torch.ones(3, 2), "b": 5}
    save_checkpoint(state, checkpoint_id=tmp_path, no_dist=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    # As megatron.core.dist_checkpointing.strategies.state_dict_saver has it.
    metadata.all_local_plans = [planner.create_local_plan()]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert CheckpointMetadata(tmp_path).shapes == {"a": (3, 2)}


def test_what_torch_writes_is_described(tmp_path: Path):
    save_checkpoint({"a": torch.ones(3, 2).half(), "b": 5, "c": torch.tensor(1)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = CheckpointMetadata(tmp_path)
    assert metadata.shapes == {"a": (3, 2), "c": ()}
    assert metadata.dtypes["a"] == torch.float16
    (chunk,) = metadata.chunks("a")
    assert isinstance(chunk, StoredChunk) and (chunk.box, chunk.file) == (((0, 3), (0, 2)), "__0_0.distcp")
