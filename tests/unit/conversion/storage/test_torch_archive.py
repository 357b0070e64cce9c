"""Archives of one tensor against torch.save, torch.load and the zip library."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.serialization import _get_layout

from conversion.storage.file_boxes import byte_view
from conversion.storage.pickles import METADATA_NAMES, RefusedPickle, unpickle
from conversion.storage.torch_archive import check_archive, find_content

TENSORS = [
    torch.randn(3, 5),
    torch.randn(7).bfloat16(),
    torch.tensor(3),
    torch.randn(1, 4, 6).half(),
    torch.arange(9, dtype=torch.int8),
    torch.randn(2, 2).double(),
]


def saved(tensor: torch.Tensor) -> bytearray:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return bytearray(stream.getvalue())


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_content_is_found_in_what_torch_saves(tensor: torch.Tensor):
    data = saved(tensor)
    content = find_content(io.BytesIO(data), "it")
    assert content is not None and (content.dtype, content.shape) == (tensor.dtype, tuple(tensor.shape))
    assert data[content.offset : content.offset + tensor.nbytes] == bytes(byte_view(tensor))


def test_views_are_left_to_torch():
    for tensor in (torch.randn(3, 4).t(), torch.randn(6)[2:], torch.randn(4, 4)[:, :2]):
        stream = io.BytesIO()
        torch.save(tensor, stream)
        assert find_content(stream, "it") is None


def test_a_pickle_that_runs_something_is_refused_by_the_name_of_what_it_asks_for():
    class Evil:
        def __reduce__(self):
            return eval, ("__import__('os').system('touch /tmp/it_ran')",)

    stream = io.BytesIO()
    torch.save(Evil(), stream)
    with pytest.raises(RefusedPickle, match=r"asks for builtins\.eval, which checkpoints of weights do not need"):
        find_content(stream, "it")


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}")
def test_a_flipped_bit_of_the_content_is_found(tensor: torch.Tensor):
    data = saved(tensor)
    check_archive(io.BytesIO(data), "it")
    content = find_content(io.BytesIO(data), "it")
    assert content is not None
    data[content.offset + tensor.nbytes - 1] ^= 1
    with pytest.raises(ValueError, match="it is damaged: archive/data/0 does not have its CRC-32"):
        check_archive(io.BytesIO(data), "it")


def test_content_that_would_end_behind_the_archive_is_refused():
    data = saved(torch.zeros(100))
    header = data.index(b"archive/data/0") - 30
    # How long the extra field is, after which the content begins.
    data[header + 28 : header + 30] = b"\xff\xff"
    with pytest.raises(ValueError, match="the content ends behind the archive"):
        find_content(io.BytesIO(data), "it")


@pytest.mark.parametrize("damage", [b"", b"PK", b"no archive at all"])
def test_what_is_no_archive_is_damaged(damage: bytes):
    with pytest.raises(ValueError, match="it is damaged"):
        find_content(io.BytesIO(damage), "it")


def test_the_list_for_metadata_has_nothing_that_acts():
    """Everything on it makes plain data: a type, a dtype, or torch's table of memory layouts."""
    for name, what in METADATA_NAMES.items():
        assert isinstance(what, type | torch.dtype) or name == ("torch.serialization", "_get_layout"), name
    with pytest.raises(ValueError, match="it is damaged"):
        unpickle(b"\x80\x04.", METADATA_NAMES, "it")


@pytest.mark.parametrize(
    "target", [b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n", b"cpathlib\nPath\n", b"ctorch.serialization\n_get_layout\n"]
)
@pytest.mark.parametrize("state", [b"N}Vload_id\nVevil\ns\x86", b"}Vload_id\nVevil\ns"], ids=["slots", "attributes"])
def test_a_pickle_cannot_change_what_outlives_it(target: bytes, state: bytes):
    """By the opcode that gives an object its state, with a class or a function in the place of the object."""
    with pytest.raises(RefusedPickle, match="would change .*(StorageMeta|Path|_get_layout).*, which checkpoints of weights do not need"):
        unpickle(b"\x80\x02" + target + state + b"b.", METADATA_NAMES, "it")
    assert StorageMeta().load_id is None
    assert not hasattr(Path, "load_id") and not hasattr(_get_layout, "load_id")
