# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder: its files, and where each tensor lies. Standard library only; `safetensors` reads tensors."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from conversion.boxes import DTYPE_BYTES
from conversion.families.registry import FAMILIES
from conversion.files.reading import open_file, read_json
from conversion.texts import listed

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
"""Tensors that may be one: files of models that tie them have one or both."""
REWARD_HEAD = "score.weight"
"""The head of reward models and critics, as transformers' models for sequence classification call it."""
ADAPTER_CONFIG = "adapter_config.json"
OF_THE_MODEL = ("generation_config.json", "*.py", "LICENSE*", "NOTICE*")
TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")
VOCABULARIES = ("*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe", "*.vocab")
"""Files of tokenizers without a tokenizer.json."""
COMPANIONS = ("*.json", "*.txt", *VOCABULARIES, *TEMPLATES, *OF_THE_MODEL)
"""Tokenizer, chat templates, generation settings, the code that `auto_map` names, and the model's licence."""
_OF_WEIGHTS = ("*.index.json", "config.json", "manifest.json", ADAPTER_CONFIG)

_OTHER_WEIGHTS = {
    ADAPTER_CONFIG: "it holds adapters of the library PEFT alone: merge them into their base model with PEFT's "
    "merge_and_unload(), save that with save_pretrained, and name its folder",
    "*.bin": (
        "its weights are pickled (.bin): load them with transformers, save them with save_pretrained, which "
        "writes safetensors"
    ),
    "*.pth": "its weights are pickled (.pth): take the model's Hugging Face files in safetensors",
    "*.gguf": "its weights are quantised for llama.cpp (.gguf): take the model's Hugging Face files in safetensors",
    "*.safetensors": (
        f"its safetensors files are neither {SINGLE_FILE} nor named by {INDEX_FILE}: rename the one, "
        "or download the index"
    ),
}

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MXFP4_BLOCK, MXFP4_BYTES = 32, 16
"""Numbers that share a scale, and the bytes in which they are stored."""
MAX_DIMENSIONS = 64
"""More than torch has."""
_EXPERTS = re.compile(r"(.+\.experts\.)(gate_up_proj|up_proj|down_proj)$")
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_TRANSPOSED = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)$")
_NEMOTRON_H = re.compile(r"model\.(?=embeddings\.|norm_f\.|layers\.\d+\.(mixer|norm)\.)")
DTYPES = {
    **{"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"},
    **{"I64": "int64", "I32": "int32", "I8": "int8", "U8": "uint8"},
}
"""Each dtype of plain weights, by its name in a header."""


def weights_by_file(hf: Path) -> dict[str, str]:
    """File of each tensor, by the index of a Hugging Face folder; all files lie in the folder or below it."""
    path = hf / INDEX_FILE
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path} has no weight_map, which says in which file each tensor is; download it again")
    for name, file in weight_map.items():
        # Links stay allowed: a snapshot of the Hub consists of them.
        is_below = isinstance(file, str) and PurePosixPath(file).as_posix() == file and not file.startswith("/")
        if not is_below or file in ("", ".") or ".." in file.split("/") or "\\" in file or "\0" in file:
            raise ValueError(
                f"{path} places {name[:200]} in {str(file)[:200]!r}, which is no file of this folder; it is not read. "
                "Move the weight files beside the index, and name them without a path"
            )
    return weight_map


def weight_files(hf: Path) -> list[Path]:
    """Weight files of a Hugging Face folder, sorted by name: as in transformers, the single file, else the index's."""
    if (hf / SINGLE_FILE).exists():
        return [hf / SINGLE_FILE]
    try:
        return sorted({hf / name for name in weights_by_file(hf).values()})
    except (OSError, ValueError) as error:
        reason = next(
            (reason for pattern, reason in _OTHER_WEIGHTS.items() if next(hf.glob(pattern), None)),
            "name a Hugging Face folder",
        )
        cause = "" if isinstance(error, FileNotFoundError) else f" ({error})"
        raise ValueError(f"{hf}: no readable {INDEX_FILE} or {SINGLE_FILE}{cause}; {reason}") from error


def files_to_hide(hf: Path) -> list[str]:
    """Names of other files that vLLM would read instead of or with the weights: an index, other safetensors files."""
    try:
        read = weight_files(hf)
    except ValueError:
        return []  # other rules say so
    is_old = (hf / INDEX_FILE).exists() and {hf / file for file in weights_by_file(hf).values()} != set(read)
    return sorted(path.name for path in set(hf.glob("*.safetensors")) - set(read)) + [INDEX_FILE] * is_old


def files_below(hf: Path) -> dict[str, str]:
    """Weight files in sub-folders, where vLLM does not look -> names for links to them beside the index."""
    try:
        names = [path.relative_to(hf).as_posix() for path in weight_files(hf)]
    except ValueError:
        return {}  # other rules say so
    links = {name: name.replace("/", "--") for name in names if "/" in name}
    return {name: f"below--{link}" if (hf / link).exists() else link for name, link in links.items()}


def stored_tensors(hf: Path) -> dict[str, tuple[Path, HeaderTensor]]:
    """File and place of each tensor of a Hugging Face folder, by headers of its weight files (see `published`).

    The index must place each of them there. It may name others: only the model tells what is needed, as in
    transformers.
    """
    files = weight_files(hf)
    file_of = None if files == [hf / SINGLE_FILE] else weights_by_file(hf)
    tensors: dict[str, tuple[Path, HeaderTensor]] = {}
    is_transposed = _has_transposed_experts(hf)
    for path in files:
        try:
            file = open_file(path)
        except PermissionError as error:
            raise ValueError(
                f"{path} may not be read by this user: {error}; let it: chmod -R a+rX {hf}, as their owner"
            ) from error
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}; download it again") from error
        try:
            found = read_header(file, path)
        finally:
            os.close(file)
        if unlisted := {name for name in found if file_of is not None and hf / str(file_of.get(name)) != path}:
            raise ValueError(f"{path} holds tensors that {INDEX_FILE} does not place there: {listed(sorted(unlisted))}")
        for name, tensor in published(found, path, is_transposed=is_transposed).items():
            if name in tensors:
                raise _twice(name, path)
            tensors[name] = (path, tensor)
    return tensors


def _has_transposed_experts(hf: Path) -> bool:
    try:
        found = FAMILIES.get(str(read_config(hf / "config.json").get("model_type")))
    except ValueError:
        return False  # other rules say so
    return found is not None and found.has_transposed_experts


def published(
    stored: Mapping[str, HeaderTensor], path: Path, *, is_transposed: bool = False
) -> dict[str, HeaderTensor]:
    """Tensors of a file by the names of published models, where it has transformers 5's (`save_original_format=False`).

    `is_transposed`: stacked experts are those of gpt-oss. ValueError: a tensor is there under two names.
    """
    tensors: dict[str, HeaderTensor] = {}
    for stored_name, tensor in stored.items():
        for name, part in (_of_gpt_oss if is_transposed else _of_transformers)(stored_name, tensor):
            if name in tensors:
                raise _twice(name, path)
            tensors[name] = part
    return tensors


def _twice(name: str, path: Path) -> ValueError:
    return ValueError(
        f"{path} holds {name}, which the folder has under another name, too (experts stacked and apart, or another "
        "prefix), and mrl does not choose; load the model with what wrote it, and save it again"
    )


def _of_transformers(stored_name: str, tensor: HeaderTensor) -> Iterator[tuple[str, HeaderTensor]]:
    """A tensor, or its parts, one for each expert.

    A layer's experts, stacked as [experts, rows, columns], become a tensor each at their place in the file; rows of
    `gate_up_proj` are those of the gate, then as many of the up projection.
    """
    name = _NEMOTRON_H.sub("backbone.", stored_name, count=1)
    found = _EXPERTS.match(name)
    parts = _EXPERT_PARTS[found[2]] if found and len(tensor.shape) == 3 else ()
    if not found or not parts or 0 in tensor.shape or tensor.shape[1] % len(parts):
        yield name, tensor
        return
    num_experts, rows, columns = tensor.shape
    shape, num_bytes = (rows // len(parts), columns), tensor.num_bytes // (num_experts * len(parts))
    for index in range(num_experts * len(parts)):
        expert, part = divmod(index, len(parts))
        place = tensor.offset + index * num_bytes
        part_name = f"{found[1]}{expert}.{parts[part]}.weight"
        yield part_name, HeaderTensor(tensor.dtype, shape, place, num_bytes, is_stacked=True)


def _of_gpt_oss(name: str, tensor: HeaderTensor) -> Iterator[tuple[str, HeaderTensor]]:
    """A tensor of a file of gpt-oss, or its parts, one for each expert.

    `gate_up_proj` and `down_proj` are [experts, inputs, outputs], or `_blocks` [experts, outputs, blocks, 16] and
    `_scales` [experts, outputs, blocks] of MXFP4; `_bias` is [experts, outputs].
    """
    found = _TRANSPOSED.match(name)
    dimensions = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
    if not found or 0 in tensor.shape or len(tensor.shape) != dimensions[found[3]]:
        yield name, tensor
        return
    num_experts, *shape = tensor.shape
    kind = {"": "weight", "_bias": "bias", "_blocks": "weight", "_scales": "scales"}[found[3]]
    part = HeaderTensor(tensor.dtype, tuple(shape), tensor.offset, tensor.num_bytes // num_experts, is_stacked=True)
    if not found[3]:
        part = replace(part, shape=(shape[1], shape[0]), is_transposed=True)
    elif found[3] == "_blocks":
        part = replace(part, dtype="BF16", shape=(shape[0], shape[1] * MXFP4_BLOCK), is_mxfp4=True)
    for index in range(num_experts):
        place = tensor.offset + index * part.num_bytes
        yield f"{found[1]}{index}.{found[2]}.{kind}", replace(part, offset=place)


def scales_of(weight: str) -> str:
    """Name of the scales of a weight in MXFP4."""
    return weight.removesuffix(".weight") + ".scales"


def has_reward_head(hf: Path) -> bool:
    """True if weights of a Hugging Face folder have a reward model's head. ValueError: they cannot be read."""
    return REWARD_HEAD in stored_tensors(hf)


def without_mtp(missing: Collection[str]) -> str:
    """Returns advice to end a message with if only tensors of MTP layers are missing; otherwise ""."""
    if not missing or not all(name.startswith("mtp.") for name in missing):
        return ""
    return (
        "; to go on without layers of multi-token prediction, set num_nextn_predict_layers to 0 in config.json of "
        "the model's folder (of a checkpoint that is converted, in its hf_config.json)"
    )


def read_config(path: Path) -> dict[str, object]:
    """The contents of a config.json."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}; it must be a model's {path.name}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object; it must be a model's {path.name}")
    return config


def write_json(path: Path, content: object) -> None:
    """Writes plain values as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, folder: Path, patterns: Sequence[str] = COMPANIONS) -> None:
    """Copies tokenizer, chat templates, generation settings and code of a Hugging Face folder."""
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not any(fnmatchcase(path.name, of_weights) for of_weights in _OF_WEIGHTS):
                target = folder / path.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def without_lost_code(config: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Contents of config.json without an `auto_map` whose code is missing: transformers could not load the model."""
    auto_map = config.get("auto_map")
    names = re.findall(r"([\w./-]+)\.\w+", json.dumps(auto_map)) if isinstance(auto_map, dict) else []
    lost = sorted({f"{name}.py" for name in names if "--" not in name and not (folder / f"{name}.py").exists()})
    if not lost:
        return dict(config)
    logger.warning(
        "config.json loses its auto_map: %s is not there; transformers' own class of this model_type reads it",
        ", ".join(lost),
    )
    return {key: value for key, value in config.items() if key != "auto_map"}


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor of a safetensors file; `offset` is that of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    is_stacked: bool = False
    """True if the file has it in one tensor with the layer's other experts."""
    is_transposed: bool = False
    """True if the file has its columns as rows."""
    is_mxfp4: bool = False
    """True if the file has blocks of MXFP4, whose scales are another tensor; `dtype` is what they are read in."""


def read_header(file: int, path: Path) -> dict[str, HeaderTensor]:
    """Reads each tensor's place from an open safetensors file: 8 bytes for the JSON header's length, header, data."""
    size = os.fstat(file).st_size
    prefix = os.pread(file, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"{path} is no safetensors file, or an incomplete one")
    tensors, end = {}, 0
    try:
        entries = {
            name: entry for name, entry in json.loads(os.pread(file, length, 8)).items() if name != "__metadata__"
        }
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            if len(entry["shape"]) > MAX_DIMENSIONS:
                raise ValueError(f"{path}: {name[:200]} has {len(entry['shape'])} dimensions; download the file again")
            shape = tuple(entry["shape"])
            if not all(isinstance(number, int) and number >= 0 for number in (start, stop, *shape)):
                raise ValueError(
                    f"{path}: {name[:200]} has a shape or place that is no number; download the file again"
                )
            dtype = DTYPES.get(entry["dtype"])
            if start != end or (dtype and stop - start != DTYPE_BYTES[dtype] * math.prod(shape)):
                raise ValueError(f"{path}: {name} has {stop - start} bytes at {start}, which does not fit its header")
            tensors[name] = HeaderTensor(entry["dtype"], shape, 8 + length + start, stop - start)
            end = stop
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {str(error)[:200]!r}; download the file again") from error
    if 8 + length + end != size:
        raise ValueError(f"{path} has {size} bytes instead of {8 + length + end}: it is incomplete or damaged")
    return tensors
