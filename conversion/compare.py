"""Compares two folders of weights, and a folder with its manifest. Either may be a Hugging Face folder or a Megatron checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from conversion.boxes import lengths
from conversion.convert import open_checkpoint
from conversion.files.manifest import file_faults, read_manifest
from conversion.files.safetensors import SafetensorsFolder
from conversion.tensors import BoxSource, blocks, byte_view, content_checksums, dtype_name, torch_dtype


def differences(first: Path, second: Path) -> Iterator[str]:
    """How the canonical tensors of two folders differ, one line each: names, shapes, dtypes, values bit for bit. Nothing if they are equal.

    Memory holds a block of each.
    """
    with ExitStack() as stack:
        (names, a), (other_names, b) = (_open(folder, stack) for folder in (first, second))
        yield from (f"{name}: only in {first}" for name in sorted(names - other_names))
        yield from (f"{name}: only in {second}" for name in sorted(other_names - names))
        for name in sorted(names & other_names):
            if a.shape(name) != b.shape(name):
                yield f"{name}: shape {a.shape(name)} and {b.shape(name)}"
                continue
            faults = [_value_fault(a, b, name)]
            if a.dtype(name) != b.dtype(name):
                faults.insert(0, f"dtype {dtype_name(a.dtype(name))} and {dtype_name(b.dtype(name))}")
            if any(faults):
                yield f"{name}: {'; '.join(filter(None, faults))}"


def faults_against_manifest(folder: Path) -> Iterator[str]:
    """How a folder differs from its manifest, one line each: every file, then the values of every tensor."""
    files = file_faults(folder)
    yield from files
    if files:
        return
    expected = read_manifest(folder).tensors
    with ExitStack() as stack:
        names, source = _open(folder, stack)
        yield from (f"{name}: in the manifest or in the files, but not in both" for name in sorted(names ^ expected.keys()))
        for name in sorted(names & expected.keys()):
            record = expected[name]
            found = (dtype_name(source.dtype(name)), source.shape(name))
            if found != (record.dtype, record.shape):
                yield f"{name}: {found[0]} {found[1]} instead of {record.dtype} {record.shape}"
            elif content_checksums(source, name, torch_dtype(record.dtype)) != (record.sha256, record.crc32):
                yield f"{name}: its values are not those of the model that was converted"


def _open(folder: Path, stack: ExitStack) -> tuple[set[str], BoxSource]:
    if (folder / "config.json").exists():
        source = stack.enter_context(SafetensorsFolder(folder))
        return source.names, source
    tensors = open_checkpoint(folder).tensors
    return set(tensors.names), tensors


def _value_fault(a: BoxSource, b: BoxSource, name: str) -> str:
    """How the values of two tensors of one shape differ; empty if they do not. Compares equal dtypes bit by bit."""
    num_different, largest, shape = 0, 0.0, a.shape(name)
    # Of two dtypes the wider one holds the values of both.
    dtype = torch.promote_types(a.dtype(name), b.dtype(name))
    for box in blocks(shape, dtype.itemsize):
        first, second = (torch.empty(lengths(box), dtype=dtype) for _ in range(2))
        a.read_into(name, box, first)
        b.read_into(name, box, second)
        if byte_view(first) == byte_view(second):
            continue
        left, right = (tensor.reshape(-1).view(torch.uint8).view(-1, dtype.itemsize) for tensor in (first, second))
        num_different += int((left != right).any(dim=1).sum())
        largest = max(largest, float((first.double() - second.double()).abs().nan_to_num(float("inf")).max()))
    return f"{num_different} of {torch.Size(shape).numel()} values differ, by at most {largest:.3g}" if num_different else ""
