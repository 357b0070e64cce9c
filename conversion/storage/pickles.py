"""Pickles of checkpoints, read with nothing but the classes that such files need: a pickle can name any function, and call it."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PosixPath, PurePosixPath

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.serialization import _get_layout

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
}
STORAGE_CLASSES = {dtype: getattr(torch, name) for name, dtype in _STORAGES.items()}
"""How pickles of tensors name a dtype."""

# A pickle may set the attributes of their instances, which are its own; not of anything that outlives it, as classes do.
_STATEFUL_CLASSES = (
    dcp.BytesStorageMetadata,
    dcp.ChunkStorageMetadata,
    dcp.Metadata,
    dcp.MetadataIndex,
    dcp.StorageMeta,
    dcp.TensorProperties,
    dcp.TensorStorageMetadata,
    # As older versions of torch wrote them.
    sharded.TensorProperties,
    _StorageInfo,
    _StoragePrefix,
)
_METADATA_CLASSES = (*_STATEFUL_CLASSES, dcp._MEM_FORMAT_ENCODING, sharded.MEM_FORMAT_ENCODING)
# Only what makes plain data. Nothing here opens, imports or runs anything.
METADATA_NAMES: dict[tuple[str, str], object] = {
    **{(kind.__module__, kind.__name__): kind for kind in _METADATA_CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "Path"): Path,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple, int, float, str, bool)},
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


class PlainTensor(tuple[torch.dtype, str, int, tuple[int, ...], tuple[int, ...]]):
    """What a pickled tensor says of itself: dtype, key of its storage, offset in it, shape, strides."""


def _plain_tensor(
    storage: tuple[torch.dtype, str], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> PlainTensor:
    return PlainTensor((*storage, offset, tuple(shape), tuple(strides)))


TENSOR_NAMES: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): _plain_tensor,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class RefusedPickle(ValueError):
    """A pickle names something that is not on the list."""


_set_state = pickle._Unpickler.dispatch[pickle.BUILD[0]]


def _set_state_of_instances(unpickler: pickle.Unpickler) -> None:
    assert isinstance(unpickler, _Unpickler)
    target = unpickler.stack[-2]
    if type(target) not in _STATEFUL_CLASSES:
        raise RefusedPickle(
            f"{unpickler.what} is a pickle that would change {target!r}, which checkpoints of weights do not need; it is not read"
        )
    _set_state(unpickler)


class _Unpickler(pickle._Unpickler):
    """The one in Python, which takes less than twice the time of the other: only here can the setting of attributes be refused."""

    stack: list[object]
    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _set_state_of_instances}

    def __init__(self, data: bytes, names: dict[tuple[str, str], object], what: str) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self.what = names, what

    def find_class(self, module: str, name: str) -> object:
        # What Python 2 called it, and old pickle protocols still do.
        module = "builtins" if module == "__builtin__" else module
        if (module, name) not in self._names:
            raise RefusedPickle(
                f"{self.what} is a pickle that asks for {module}.{name}, which checkpoints of weights do not need and which could run "
                "anything; it is not read. Save the checkpoint again in Megatron's torch_dist format"
            )
        return self._names[module, name]

    def persistent_load(self, pid: object) -> tuple[torch.dtype, str]:
        match pid:
            case ("storage", torch.dtype() as dtype, str() as key, str(), int()):
                return dtype, key
        raise RefusedPickle(f"{self.what} refers to {pid!r}, which is not a storage of plain weights")


def unpickle(data: bytes, names: dict[tuple[str, str], object], what: str) -> object:
    """The object of a pickle that needs nothing but `names`; `what` says in messages what is read.

    Raises:
        RefusedPickle: it asks for something else.
        ValueError: it is damaged.
    """
    try:
        return _Unpickler(data, names, what).load()
    except RefusedPickle:
        raise
    # A damaged pickle can make its classes raise anything.
    except Exception as error:
        raise ValueError(f"{what} is damaged: {error!r}") from error
