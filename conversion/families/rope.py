# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of a config.json: base, kind and numbers, in both spellings, and what Megatron takes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conversion.families.settings import (
    HfConfig,
    Settings,
    choice,
    ignore,
    known_keys,
    positive_integer,
    positive_number,
    refuse_unread,
)

_LENGTH = "original_max_position_embeddings"

# Megatron's code fixes these numbers of llama3 scaling; only the factor is an argument.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Rope:
    """Rotary positions, scaled in one way at most, as Megatron takes them."""

    base: float
    percent: float = 1.0
    """Part of each head that is rotated."""
    model: Mapping[str, object] = field(default_factory=dict)
    attributes: Mapping[str, object] = field(default_factory=dict)
    """Values that Megatron reads from a TransformerConfig without fields for them."""


def rope_settings(hf_config: HfConfig, *, may_be_partial: bool = False) -> tuple[float, str, Settings]:
    """Rotary positions' base, kind and numbers from `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling`.

    As in transformers 5, and so in vLLM, `rope_scaling` replaces `rope_parameters`.
    """
    key = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    given = hf_config.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"config.json: {key}={given!r} must be a mapping")
    for holder, prefix in () if may_be_partial else ((given, f"{key}."), (hf_config, "")):
        if (part := holder.get("partial_rotary_factor")) not in (None, 1.0):
            raise ValueError(f"config.json: {prefix}partial_rotary_factor={part!r} is not supported; only 1.0 is")
    nested = sorted(str(name) for name, value in given.items() if isinstance(value, dict))
    if nested:
        raise ValueError(
            f"config.json: {key} has rotary positions for each kind of layer ({', '.join(nested)}), which is not "
            "supported; give one mapping for all"
        )
    hidden = hf_config.get("rope_parameters")
    if not {"rope_theta"} & {*given, *hf_config} and isinstance(hidden, dict) and hidden.get("rope_theta") is not None:
        raise ValueError(
            "config.json: rope_scaling replaces rope_parameters, and lacks rope_theta; give it "
            f"{hidden['rope_theta']!r} there"
        )
    theta = given.get("rope_theta", hf_config.get("rope_theta"))
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind != "default":
        given = {_LENGTH: _original_length(hf_config, given), **given}
    return positive_number({"rope_theta": theta}, "rope_theta"), kind, Settings(given, {})


def _original_length(hf_config: HfConfig, given: HfConfig) -> object:
    """The length that scaled positions were trained for, where their mapping lacks it, as transformers has it."""
    beside = hf_config.get(_LENGTH)
    if beside is not None and given.get(_LENGTH, beside) != beside:
        raise ValueError(
            f"config.json: {_LENGTH}={beside!r} stands beside the rotary positions' {given[_LENGTH]!r}, and libraries "
            "differ in which counts; leave out one"
        )
    return beside or hf_config.get("max_position_embeddings")


def read_rope(hf_config: HfConfig, *, percent: float | None = None, unused: tuple[str, ...] = ()) -> Rope:
    """Rotary positions of a family with only Llama 3's scaling or YaRN (arXiv:2309.00071), as transformers reads it.

    `percent` is the default of a family that rotates a part of each head; None for one that rotates the whole. `unused`
    keys change nothing of a text.
    """
    base, kind, given = rope_settings(hf_config, may_be_partial=percent is not None)
    ignore(given, *unused)
    rope = _read_kind(hf_config, base, kind, given, percent)
    refuse_unread_positions(kind, given)
    return rope


def refuse_unread_positions(kind: str, given: Settings) -> None:
    """Raises ValueError for a rotary key that transformers or vLLM reads for this kind, and nobody has asked for."""
    read = given.read | {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    refuse_unread(given, read, known_keys()["rope"][kind], of=f"rope_type={kind!r}", prefix="rotary positions: ")


def _read_kind(hf_config: HfConfig, base: float, kind: str, given: HfConfig, percent: float | None) -> Rope:
    part = positive_number(
        given if "partial_rotary_factor" in given else hf_config, "partial_rotary_factor", percent or 1.0
    )
    if part > 1.0 or (part < 1.0 and kind != "default"):
        raise ValueError(
            f"config.json: partial_rotary_factor={part!r} with rope_type={kind!r} is not supported; only 1.0 is"
        )
    if kind == "default":
        return Rope(base, part)
    if kind == "yarn":
        return Rope(base, model={"position_embedding_type": "yarn"}, attributes=_read_yarn(given))
    if kind != "llama3":
        raise ValueError(f"config.json: rope_type={kind!r} is not supported; only default, llama3 and yarn are")
    for name, value in _LLAMA3.items():
        if given.get(name) != value:
            raise ValueError(
                f"config.json: rope scaling {name}={given.get(name)!r} is not supported; Megatron's llama3 scaling "
                f"only has {value}"
            )
    return Rope(base, model=dict(rope_scaling=True, rope_scaling_factor=positive_number(given, "factor")))


def _read_yarn(given: HfConfig) -> dict[str, object]:
    if given.get("attention_factor") is not None:
        value = given["attention_factor"]
        raise ValueError(
            f"config.json: attention_factor={value!r} is not supported; Megatron takes it from the factor, or from "
            "mscale"
        )
    # The magnitudes count only if both are set; otherwise the factor gives the magnitude.
    has_magnitudes = bool(given.get("mscale") and given.get("mscale_all_dim"))
    mscale, mscale_all_dim = (
        positive_number(given, key) if has_magnitudes else None for key in ("mscale", "mscale_all_dim")
    )
    return dict(
        yarn_rotary_scaling_factor=positive_number(given, "factor"),
        yarn_original_max_position_embeddings=positive_integer(given, "original_max_position_embeddings"),
        yarn_beta_fast=positive_number(given, "beta_fast", 32.0),
        yarn_beta_slow=positive_number(given, "beta_slow", 1.0),
        yarn_mscale=mscale,
        yarn_mscale_all_dim=mscale_all_dim,
        yarn_correction_range_round_to_int=choice(given, "truncate", default=True),
    )
