# SPDX-License-Identifier: Apache-2.0
"""The format of files of rollouts: dataclasses and arrays as JSON and plain bytes with a checksum, nothing that could
become code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from conversion.files.durable import WRITE_TIMEOUT_S, read_whole, sync_file
from conversion.files.limits import within

T = TypeVar("T")
FORMAT = 2
"""Version of the files. A reader refuses another one."""
KINDS = "biuf"
"""Kinds of arrays that a file may hold: numbers."""


def write_record(path: Path, value: object) -> int:
    """Writes a dataclass, with its payloads, whole or not at all; returns its bytes. OSError: not written."""
    arrays: list[np.ndarray] = []
    content = _plain(value, arrays)
    index = (
        json.dumps({"content": content, "arrays": [[array.dtype.str, array.shape] for array in arrays]}).encode()
        + b"\n"
    )
    parts = [index, *(np.ascontiguousarray(array).data for array in arrays if array.size)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    header = json.dumps({"format": FORMAT, "kind": type(value).__name__, "sha256": digest.hexdigest()}).encode() + b"\n"
    within(WRITE_TIMEOUT_S, f"write of {path}", _write, path, [header, *parts])
    return len(header) + sum(memoryview(part).nbytes for part in parts)


def _write(path: Path, parts: Sequence[Any]) -> None:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with aside.open("wb") as file:
            for part in parts:
                file.write(part)
        sync_file(aside)
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_file(path.parent)


def read_record(path: Path, kind: type[T]) -> T:
    """The dataclass that a file holds. ValueError: it is damaged or of another format; OSError: it cannot be read."""
    content = read_whole(path)
    try:
        header, _, body = content.partition(b"\n")
        found = json.loads(header)
        is_known = found["format"] == FORMAT and found["kind"] == kind.__name__
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its first line is no header") from error
    if not is_known:
        raise ValueError(
            f"{path} has format {found['format']!r} of {found['kind']!r}; this version of mrl reads {FORMAT} of "
            f"{kind.__name__}: use the version that wrote it"
        )
    if hashlib.sha256(body).hexdigest() != found.get("sha256"):
        raise ValueError(f"{path} is damaged: its bytes differ from its checksum")
    try:
        index, _, data = body.partition(b"\n")
        index = json.loads(index)
        return _restored(kind, index["content"], _arrays(index["arrays"], data))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is of another version of mrl: {error!r}") from error


def _arrays(described: Sequence[tuple[str, Sequence[int]]], data: bytes) -> list[np.ndarray]:
    arrays, start = [], 0
    for name, shape in described:
        dtype = np.dtype(name)
        if dtype.kind not in KINDS:
            raise ValueError(f"arrays of {name}")
        count = math.prod(shape)
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape).copy())
        start += count * dtype.itemsize
    return arrays


def _plain(value: object, arrays: list[np.ndarray]) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {name: _plain(getattr(value, name), arrays) for name in fields}
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return len(arrays) - 1
    if isinstance(value, Mapping):
        return {str(name): _plain(item, arrays) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, arrays) for item in value]
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _restored(hint: Any, value: Any, arrays: Sequence[np.ndarray]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin is UnionType:
        return _restored(next(kind for kind in arguments if kind is not NoneType), value, arrays)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return hint(**{name: _restored(_hints(hint)[name], item, arrays) for name, item in value.items()})
    if hint is np.ndarray:
        return arrays[value]
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_restored(kind, item, arrays) for kind, item in zip(kinds, value, strict=True))
    if origin in (dict, Mapping):
        return {arguments[0](name): _restored(arguments[1], item, arrays) for name, item in value.items()}
    return value
