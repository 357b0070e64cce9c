# SPDX-License-Identifier: Apache-2.0
"""Reads config.json: sizes with their ranges, refusal of settings that change a model in an unknown way, and arguments of routers."""

from __future__ import annotations

from collections.abc import Mapping

HfConfig = Mapping[str, object]
"""The contents of a config.json."""


def positive_integer(hf_config: HfConfig, key: str, default: int | None = None) -> int:
    """A size; `default` where the key is missing or null."""
    value = hf_config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key}={value!r} must be a positive integer")
    return value


def optional_integer(hf_config: HfConfig, key: str) -> int | None:
    """A size that the model may lack: None where the key is missing or null."""
    return None if hf_config.get(key) is None else positive_integer(hf_config, key)


def positive_number(hf_config: HfConfig, key: str, default: float | None = None) -> float:
    """A positive number; `default` where the key is missing or null."""
    value = hf_config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"config.json: {key}={value!r} must be a positive number")
    return float(value)


def choice(hf_config: HfConfig, key: str, *, default: bool) -> bool:
    """A true or false setting; `default` where the key is missing or null."""
    value = hf_config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key}={value!r} must be true or false")
    return value


def check_settings(hf_config: HfConfig, supported: Mapping[str, tuple[object, ...]]) -> None:
    """Compares settings with the values that are supported; a key that is missing has the first of them."""
    for key, values in supported.items():
        value = hf_config.get(key, values[0])
        if value not in values:
            raise ValueError(f"config.json: {key}={value!r} is not supported for {hf_config.get('model_type')}; only {values[0]!r} is")


def softmax_router(topk: int, *, normalised: bool) -> dict[str, object]:
    """Arguments of a softmax router; `normalised` where the weights of the chosen experts sum to one."""
    if normalised:
        _check_normalised(topk)
    return dict(moe_router_score_function="softmax", moe_router_pre_softmax=not normalised)


def sigmoid_router(hf_config: HfConfig, topk: int) -> dict[str, object]:
    """Arguments of a sigmoid router with correction bias and normalised weights, which chooses within `topk_group` of `n_group` groups."""
    _check_normalised(topk)
    groups, chosen_groups = positive_integer(hf_config, "n_group", 1), positive_integer(hf_config, "topk_group", 1)
    if groups > 1 and topk // chosen_groups != 2:
        # transformers and vLLM rate a group by the sum of its best two experts, Megatron by that of its best topk / topk_group.
        raise ValueError(
            f"config.json: num_experts_per_tok={topk} with topk_group={chosen_groups} is not supported; Megatron routes to the same groups "
            "only where the first is twice the second"
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
        raise ValueError("config.json: num_experts_per_tok=1 with normalised weights is not supported; Megatron needs two experts for that")
