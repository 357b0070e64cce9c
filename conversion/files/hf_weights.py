# SPDX-License-Identifier: Apache-2.0
"""Hugging Face weights against config.json: names, shapes, dtypes, tied embeddings. Reads headers, without torch."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

from conversion.boxes import DTYPE_BYTES
from conversion.families.registry import family
from conversion.families.settings import HfConfig
from conversion.files.hf_folder import (
    DTYPES,
    EMBEDDING,
    MXFP4_BLOCK,
    OUTPUT,
    REWARD_HEAD,
    HeaderTensor,
    read_config,
    scales_of,
    stored_tensors,
    without_mtp,
)
from conversion.files.reading import open_file
from conversion.texts import listed

logger = logging.getLogger(__name__)

TIED = "tie_word_embeddings"
_FLOATS = tuple(name for name, dtype in DTYPES.items() if "float" in dtype)
_BLOCK_BYTES = 4 << 20

Stored = Mapping[str, tuple[Path, HeaderTensor]]


def read_model_config(hf: Path) -> dict[str, object]:
    """The contents of config.json as the weights have them.

    Tied embeddings count as untied where the weights have an output layer that differs from the embedding: transformers
    then keeps both, and vLLM follows config.json. A reward model of transformers has a head in place of its output
    layer, which nothing multiplies with: it counts as tied.
    """
    config = read_config(hf / "config.json")
    if config.get(TIED) is not True:
        has_head = any(
            str(name).endswith("ForSequenceClassification")
            for name in cast("list[object]", config.get("architectures") or [])
        )
        return {**config, TIED: True} if has_head and OUTPUT not in stored_tensors(hf) else config
    stored, untied = stored_tensors(hf), {**config, TIED: False}
    embedding = next(iter(family(untied).canonical(untied)))
    return untied if OUTPUT in stored and embedding in stored and not _are_equal(stored, embedding, OUTPUT) else config


def is_unused(name: str, config: HfConfig) -> bool:
    """True if a tensor is a copied embedding, frequencies or scales of others, or of MTP layers left out."""
    is_derived = name.endswith(".rotary_emb.inv_freq") or (name == OUTPUT and config.get(TIED) is True)
    has_scales = family(config).has_transposed_experts and name.endswith(".scales")
    return is_derived or has_scales or family(config).is_left_out(config, name)


def check_hf(hf: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors to read in a Hugging Face folder. ValueError: not as config.json says (a head may be added)."""
    config, stored = read_model_config(hf), stored_tensors(hf)
    shapes = dict(family(config).canonical(config))
    if REWARD_HEAD in stored:
        shapes[REWARD_HEAD] = (1, int(str(config["hidden_size"])))
    if left_out := [name for name in stored if family(config).is_left_out(config, name)]:
        found = len(left_out), listed(sorted(left_out))
        logger.warning("%s: multi-token prediction is neither trained nor exported (tensors: %d): %s", hf, *found)
    used = {name: tensor for name, (_, tensor) in stored.items() if not is_unused(name, config)}
    if has_output_alone(stored, config):
        used[EMBEDDING] = stored[OUTPUT][1]
    check_tensors(hf, used, shapes)
    for name in (name for name, tensor in used.items() if tensor.is_mxfp4):
        rows, columns = used[name].shape
        if (found := stored.get(scales_of(name))) is None or found[1].shape != (rows, columns // MXFP4_BLOCK):
            raise ValueError(
                f"{hf}: {name} is stored in MXFP4 without its scales ({scales_of(name)}); download it again"
            )
    return shapes


def has_output_alone(stored: Collection[str], config: HfConfig) -> bool:
    """True if weights of a model with tied embeddings have the tensor under the output layer's name alone."""
    return config.get(TIED) is True and OUTPUT in stored and EMBEDDING not in stored


def check_tensors(hf: Path, stored: Mapping[str, HeaderTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless the weight files hold exactly these tensors, unquantised."""
    for name in sorted(stored):
        if stored[name].dtype not in _FLOATS:
            raise ValueError(
                f"{hf}: {name} has dtype {stored[name].dtype}, which only quantised weights have; take those in one of "
                f"{', '.join(_FLOATS)} from the model's publisher, or as transformers dequantises them"
            )
    missing, unknown = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
    if any(".block_sparse_moe." in name for name in missing) and any(".mlp.experts." in name for name in unknown):
        raise ValueError(
            f"{hf}: the experts have the form of transformers 5 (save_original_format=False), which vLLM does not read "
            "of this model_type; load the model with transformers, and save it with save_pretrained(folder)"
        )
    if missing or unknown:
        raise ValueError(
            f"{hf}: the weights do not fit config.json; missing: {listed(sorted(missing))}; "
            f"unknown to this model_type: {listed(sorted(unknown))}{without_mtp(missing)}"
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise ValueError(f"{hf}: {name} has shape {stored[name].shape}; by config.json it must be {shape}")


def describe_dtypes(hf: Path, precision: str) -> str:
    """Counts the tensors of each dtype, and names those that a run in `precision` rounds in trainer and engines."""
    config, stored = read_model_config(hf), stored_tensors(hf)
    kept = family(config).float32_tensors(config)
    counts = Counter(DTYPES.get(tensor.dtype, tensor.dtype) for _, tensor in stored.values())
    rounded = sorted(
        name
        for name, (_, tensor) in stored.items()
        if name not in kept and is_rounded(DTYPES.get(tensor.dtype, ""), precision)
    )
    text = ", ".join(f"{count:,} {dtype}" for dtype, count in counts.most_common())
    return f"{text}; {len(rounded):,} are rounded to {precision}, the first is {rounded[0]}" if rounded else text


def is_rounded(dtype: str, precision: str) -> bool:
    """True if values of a dtype change in a precision."""
    return DTYPE_BYTES.get(dtype, 0) > DTYPE_BYTES[precision] or (dtype, precision) == ("float16", "bfloat16")


def _are_equal(stored: Stored, first: str, second: str) -> bool:
    (path, one), (other_path, other) = stored[first], stored[second]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = open_file(path), open_file(other_path)
    try:
        for start in range(0, one.num_bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, one.num_bytes - start)
            if os.pread(left, size, one.offset + start) != os.pread(right, size, other.offset + start):
                return False
        return True
    finally:
        os.close(left)
        os.close(right)
