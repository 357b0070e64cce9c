# SPDX-License-Identifier: Apache-2.0
"""The folder of a Hugging Face model: its files, and where each tensor lies in them. Standard library only; `safetensors` reads tensors."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from conversion.boxes import DTYPE_BYTES
from conversion.files.reading import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

REWARD_HEAD = "score.weight"
"""The head of reward models and critics, as transformers' models for sequence classification call it."""

# Files that describe weights; all others next to them are tokenizer, template or generation settings.
_WEIGHT_FILES = (SINGLE_FILE, INDEX_FILE, "config.json", "manifest.json")
_COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja")

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_DIMENSIONS = 64
"""More than torch has."""
DTYPES = {
    **{"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"},
    **{"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8"},
}
"""Each dtype of plain weights, by its name in a header."""


def weights_by_file(hf: Path) -> dict[str, str]:
    """File of each tensor, by the index of a Hugging Face folder; all files lie in the folder."""
    path = hf / INDEX_FILE
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path} has no weight_map, which says in which file each tensor is; download it again")
    for name, file in weight_map.items():
        # Links stay allowed: a snapshot of the Hub consists of them.
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise ValueError(
                f"{path} places {name[:200]} in {str(file)[:200]!r}, which is no file of this folder; it is not read. "
                "Name weight files without a path"
            )
    return weight_map


def weight_files(hf: Path) -> list[Path]:
    """The files that hold the weights of a Hugging Face folder, sorted by name."""
    index = hf / INDEX_FILE
    if not index.exists() and (hf / SINGLE_FILE).exists():
        return [hf / SINGLE_FILE]
    try:
        return sorted({hf / name for name in weights_by_file(hf).values()})
    except (OSError, ValueError) as error:
        raise ValueError(f"{hf}: no readable {INDEX_FILE} or {SINGLE_FILE} ({error}); name a Hugging Face folder") from error


def has_reward_head(hf: Path) -> bool:
    """Whether the weights of a Hugging Face folder have the head of a reward model. ValueError: they cannot be read."""
    if (hf / INDEX_FILE).exists():
        return REWARD_HEAD in weights_by_file(hf)
    with open(hf / SINGLE_FILE, "rb") as file:
        return REWARD_HEAD in read_header(file.fileno(), hf / SINGLE_FILE)


def without_mtp(missing: Collection[str]) -> str:
    """How to go on without these tensors, as the end of a message; "" if they are not all of MTP layers."""
    if not missing or not all(name.startswith("mtp.") for name in missing):
        return ""
    return (
        "; to go on without layers of multi-token prediction, set num_nextn_predict_layers to 0 in config.json of the model's folder "
        "(of a checkpoint that is converted, in its hf_config.json)"
    )


def read_config(path: Path) -> dict[str, object]:
    """The contents of a config.json."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}; it must be a model's config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object; it must be a model's config.json")
    return config


def write_json(path: Path, content: object) -> None:
    """Writes plain values as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, folder: Path) -> None:
    """Copies tokenizer, chat template and generation settings of a Hugging Face folder."""
    for pattern in _COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in _WEIGHT_FILES:
                shutil.copyfile(path, folder / path.name)


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor of a safetensors file; `offset` is that of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(file: int, path: Path) -> dict[str, HeaderTensor]:
    """Where each tensor of an open safetensors file lies: 8 bytes with the length of a JSON header, the header, the data."""
    size = os.fstat(file).st_size
    prefix = os.pread(file, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"{path} is no safetensors file, or an incomplete one")
    tensors, end = {}, 0
    try:
        entries = {name: entry for name, entry in json.loads(os.pread(file, length, 8)).items() if name != "__metadata__"}
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            if len(entry["shape"]) > MAX_DIMENSIONS:
                raise ValueError(f"{path}: {name[:200]} has {len(entry['shape'])} dimensions; download the file again")
            shape = tuple(entry["shape"])
            if not all(isinstance(number, int) and number >= 0 for number in (start, stop, *shape)):
                raise ValueError(f"{path}: {name[:200]} has a shape or place that is no number; download the file again")
            dtype = DTYPES.get(entry["dtype"])
            if start != end or (dtype and stop - start != DTYPE_BYTES[dtype] * math.prod(shape)):
                raise ValueError(f"{path}: {name} has {stop - start} bytes at {start}, which does not fit its header")
            tensors[name] = HeaderTensor(entry["dtype"], shape, 8 + length + start)
            end = stop
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {str(error)[:200]!r}; download the file again") from error
    if 8 + length + end != size:
        raise ValueError(f"{path} has {size} bytes instead of {8 + length + end}: it is incomplete or damaged")
    return tensors
