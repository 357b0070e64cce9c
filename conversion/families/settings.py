# SPDX-License-Identifier: Apache-2.0
"""Reads config.json: sizes with ranges, refusal of settings that change a model in unknown ways, router arguments."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HfConfig = Mapping[str, object]
"""The contents of a config.json."""


class Settings(Mapping[str, object]):
    """A config.json as a family reads it: has transformers' values for missing keys, and remembers keys asked for."""

    def __init__(self, values: HfConfig, defaults: HfConfig) -> None:
        self._values, self._defaults = values, defaults
        self.read = set[str]()

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return self._values[key] if key in self._values else self._defaults[key]

    def __contains__(self, key: object) -> bool:
        """True if the file has a key."""
        self.read.add(str(key))
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@functools.cache
def known_keys() -> dict[str, Any]:
    """The keys that transformers and vLLM read, as scripts/config_keys.py found them."""
    return json.loads(Path(__file__).with_name("config_keys.json").read_text(encoding="utf-8"))


def refuse_unread(
    values: HfConfig, read: set[str], off: Mapping[str, list[object]], *, of: str, prefix: str = ""
) -> None:
    """Raises ValueError for a key that transformers or vLLM reads (`off`: harmless values) and the family does not."""
    for key in values.keys() & off.keys() - read:
        if values[key] is not None and values[key] not in off[key]:
            way_out = " or ".join(["leave it out", *(f"set {value!r}" for value in off[key][:1])])
            raise ValueError(
                f"config.json: {prefix}{key}={values[key]!r} is not supported for {of}: transformers or vLLM reads "
                f"it, and mrl's trainer does not; {way_out}"
            )


def ignore(hf_config: HfConfig, *keys: str) -> None:
    """Notes keys that a family knows and ignores: they describe parts that this model lacks."""
    for key in keys:
        hf_config.get(key)


def _way_out(value: object) -> str:
    return "; write the model's own into the file" if value is None else ""


def positive_integer(hf_config: HfConfig, key: str, default: int | None = None) -> int:
    """A size; `default` where the key is missing or null."""
    value = hf_config.get(key) if key in hf_config or default is not None else None
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key}={value!r} must be a positive integer{_way_out(value)}")
    return value


def check_multiple(hf_config: HfConfig, whole: str, part: str) -> None:
    """Raises ValueError unless the size `part`, where config.json has one, divides the size `whole`."""
    if (share := optional_integer(hf_config, part)) and positive_integer(hf_config, whole) % share:
        raise ValueError(f"config.json: {whole}={hf_config[whole]} must be a multiple of {part}={share}")


def optional_integer(hf_config: HfConfig, key: str) -> int | None:
    """A size that the model may lack: None where the key is missing or null."""
    value = hf_config.get(key)
    return None if value is None else positive_integer({key: value}, key)


def positive_number(hf_config: HfConfig, key: str, default: float | None = None) -> float:
    """A positive number; `default` where the key is missing or null."""
    value = hf_config.get(key) if key in hf_config or default is not None else None
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key}={value!r} must be a positive number{_way_out(value)}")
    return float(value)


def choice(hf_config: HfConfig, key: str, *, default: bool) -> bool:
    """A true or false setting; `default` where the key is missing or null."""
    value = hf_config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={value!r} must be true or false")
    return value


_WAYS_OUT = {
    "quantization_config": "the weights that it describes are quantised: take the model's bfloat16 weights (a folder "
    "with them and without this key), from its publisher or as transformers dequantises them"
}


def check_settings(hf_config: HfConfig, supported: Mapping[str, tuple[object, ...]]) -> None:
    """Compares settings with the values that are supported; a key that is missing has the first of them."""
    for key, values in supported.items():
        value = hf_config.get(key, values[0])
        if value not in values:
            way_out = _WAYS_OUT.get(key, f"only {values[0]!r} is")
            raise ValueError(
                f"config.json: {key}={value!r} is not supported for {hf_config.get('model_type')}; {way_out}"
            )


def softmax_router(topk: int, *, normalised: bool) -> dict[str, object]:
    """Arguments of a softmax router; `normalised` where the weights of the chosen experts sum to one."""
    if normalised:
        _check_normalised(topk)
    return dict(moe_router_score_function="softmax", moe_router_pre_softmax=not normalised)


def sigmoid_router(hf_config: HfConfig, topk: int) -> dict[str, object]:
    """Sigmoid router arguments: correction bias, normalised weights, choice within `topk_group` of `n_group` groups."""
    _check_normalised(topk)
    groups, chosen_groups = positive_integer(hf_config, "n_group", 1), positive_integer(hf_config, "topk_group", 1)
    if groups > 1 and topk // chosen_groups != 2:
        # transformers and vLLM rate a group by the sum of its best two experts, Megatron by that of its best topk /
        # topk_group.
        raise ValueError(
            f"config.json: num_experts_per_tok={topk} with topk_group={chosen_groups} is not supported; Megatron "
            "routes to the same groups only where the first is twice the second"
        )
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_pre_softmax=False,
        moe_router_topk_scaling_factor=positive_number(hf_config, "routed_scaling_factor", 1.0),
        moe_router_num_groups=None if groups == 1 else groups,
        moe_router_group_topk=None if groups == 1 else chosen_groups,
    )


def _check_normalised(topk: int) -> None:
    if topk == 1:
        raise ValueError(
            "config.json: num_experts_per_tok=1 with normalised weights is not supported; Megatron needs two "
            "experts for that"
        )
