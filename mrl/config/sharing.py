# SPDX-License-Identifier: Apache-2.0
"""Decides whether passes may compute common beginnings once: `policy.share_prefixes`, and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mrl.config.errors import spell
from mrl.config.model import ModelSizes, read_model
from mrl.config.schema.policy import ShareOrNot
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName

AUTO = "auto"
LEAST_SAVING = 1.25
"""Tokens of a batch's sequences over those with common beginnings once, from which `auto` shares. Chosen, not measured:
1.88 is the lowest ratio of scripts/bench/prefix.py, and pays; a tree's further calls of kernels may outweigh less.
"""
OF_ROWS = ("aux_loss", "global_aux_loss")
"""Auxiliary losses that depend on the rows of a batch: a mean over them, and of experts' counts in those so far."""

_MEGATRON = "policy.megatron_cfg"
_SHARED, _NOT_SHARED = "trained once for all rollouts of a prompt", "trained with each rollout"
_ENOUGH = f"that saves a batch {1 - 1 / LEAST_SAVING:.0%} of its tokens or more"


def find_obstacles(config: RunConfig) -> Iterator[tuple[str, object, object]]:
    """Keys with which rows cannot be trees of prefixes, their values, and the values that they need."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    for key, value, right in (
        ("algorithm", config.algorithm, "grpo"),
        ("policy.sequence_packing.enabled", policy.sequence_packing.enabled, True),
        (f"{_MEGATRON}.context_parallel_size", megatron.context_parallel_size, 1),
        (f"{_MEGATRON}.fp8_cfg.enabled", megatron.fp8_cfg.enabled, False),
        (f"{_MEGATRON}.mtp_num_layers", megatron.mtp_num_layers if config.mtp_steps else 0, 0),
        (f"{_MEGATRON}.peft.dropout", megatron.peft.dropout if megatron.peft.enabled else 0, 0),
    ):
        if value != right:
            yield key, value, right


def obstacle_to_auto(config: RunConfig) -> str:
    """The reason why `auto` never shares in this run; "" if a batch decides. ValueError: the model is not known."""
    for key, value, right in find_obstacles(config):
        return f"{key}={spell(value)}, and it goes only with {spell(right)}"
    megatron = config.policy.megatron_cfg
    if part := _part_without_trees(Path(config.policy.model_name)):
        return f"the model has {part} no trees of prefixes"
    balancing = megatron.moe_router_load_balancing_type
    if balancing in OF_ROWS and megatron.moe_aux_loss_coeff > 0:
        return f"{_MEGATRON}.moe_router_load_balancing_type={balancing} depends on the rows, and these would change"
    if config.cluster.gpus_per_node:
        return "no run on GPUs has shown yet that it pays there; policy.share_prefixes=true tries it"
    return ""


# Every batch asks, which must not wait for the file system of the model.
@cache
def _part_without_trees(folder: Path) -> str:
    return part_without_trees(read_model(folder))


def part_without_trees(model: ModelSizes) -> str:
    """The kind of layer of a model that computes no trees of prefixes, with the verb; "" for none."""
    if model.mla:
        return "latent attention, which computes"
    if model.window:
        return "attention sinks, with which attention computes"
    return "gated delta nets, which compute" if model.has_delta_nets else ""


def sharing_of(config: RunConfig, model: ModelName = "policy") -> ShareOrNot:
    """`share_prefixes` of a model in this run: auto only where a batch decides."""
    given = config.model(model).share_prefixes
    return given if given != AUTO or not obstacle_to_auto(config) else False


def describe_sharing(config: RunConfig) -> str:
    """The sharing of a run's prefixes, in words."""
    given = config.policy.share_prefixes
    if given != AUTO:
        return _SHARED if given else _NOT_SHARED
    try:
        reason = obstacle_to_auto(config)
    except ValueError:
        return f"{_SHARED} where the model allows it and {_ENOUGH}"
    if reason:
        return f"{_NOT_SHARED}: {reason}"
    return f"{_SHARED} where {_ENOUGH}"


def describe_choice(config: RunConfig, *, shares: bool) -> str:
    """The choice of `auto` for a batch, for the log; "" where it has none."""
    if config.policy.share_prefixes != AUTO or not sharing_of(config):
        return ""
    what = "shares prefixes" if shares else "shares no prefixes, as they would save too few tokens"
    return f"policy.share_prefixes=auto: the first batch {what}; each batch decides by its tokens"
