# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv:2106.09685) as tables: which linear layers have one, and how holders cut its factors.

An adapter adds scale * B A to a weight W [out, in], with A [dim, in] and B [out, dim]. The tensors of a fused weight
(q, k, v; gate, up) share one A. Factors are cut as their weight is, so they have rules like any other tensor. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from conversion.cuts import (
    Canonical,
    ColumnParallel,
    Cut,
    Experts,
    Gated,
    Joined,
    Qkv,
    Regrouped,
    Replicated,
    RowParallel,
    Sections,
)
from conversion.families.common import Family, HfConfig, Model, Rule

Kind = Literal["column", "row", "whole"]
"""Dimension of the weight that Megatron cuts over ranks, or `whole` for none."""

LINEAR: Mapping[str, Kind] = {
    "linear_qkv": "column",
    "linear_proj": "row",
    "linear_q_proj": "column",
    "linear_q_down_proj": "whole",
    "linear_q_up_proj": "column",
    "linear_kv_down_proj": "whole",
    "linear_kv_up_proj": "column",
    "linear_fc1": "column",
    "linear_fc2": "row",
    "in_proj": "column",
    "out_proj": "row",
    "fc1_latent_proj": "whole",
    "fc2_latent_proj": "whole",
}
"""Megatron's names of the linear layers that can have adapters: those of attention, MLPs, experts and Mamba."""

INPUT, OUTPUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"
"""Suffixes of a linear layer's A and B, as Megatron-Bridge names them."""

_LAYERS = "decoder.layers."


def linear_layers(family: Family, hf_config: HfConfig) -> list[str]:
    """Full names of linear layers that can be adapted (decoder.layers.0.mlp.experts.linear_fc1), counted globally."""
    return list(_linear_rules(family.model(hf_config, None)))


def adapted_layers(
    family: Family, hf_config: HfConfig, *, target_modules: Sequence[str] = (), exclude_modules: Sequence[str] = ()
) -> tuple[str, ...]:
    """Full names of the layers to adapt: those a target names or matches; without targets, all but the excluded ones.

    A pattern is the last part of a full name, or stands for a full name with "*" for any characters.
    """
    names = linear_layers(family, hf_config)
    for pattern in (*target_modules, *exclude_modules):
        if not any(_matches(pattern, name) for name in names):
            last = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise ValueError(
                f"{pattern!r} names no linear layer of the model; use {', '.join(last)}, or full names with * as "
                f"{names[0]!r}"
            )
    return tuple(
        name
        for name in names
        if (any(_matches(pattern, name) for pattern in target_modules) if target_modules else True)
        and not any(_matches(pattern, name) for pattern in exclude_modules)
    )


@lru_cache(maxsize=16)
def adapter_family(family: Family, layers: tuple[str, ...], dim: int) -> Family:
    """The factors of the adapters of these layers as a family of its own: its layouts hold nothing else.

    Every expert has its own adapter, named as under the local specs, whatever the specs of the model.
    """

    def model(hf_config: HfConfig, padded_vocabulary: int | None) -> Model:
        base = family.model(hf_config, padded_vocabulary)
        rules: list[list[Rule]] = [[] for _ in base.layers]
        for name, (index, rule) in _linear_rules(base).items():
            if name in layers:
                rules[index] += _factors(rule, dim)
        return Model(first=(), layers=tuple(map(tuple, rules)), last=())

    return replace(family, model=model)


def adapted_weights(model: Model, layers: Sequence[str]) -> Model:
    """The weights of these linear layers as a model of their own."""
    kept: list[list[Rule]] = [[] for _ in model.layers]
    for name, (index, rule) in _linear_rules(model).items():
        if name in layers:
            kept[index].append(rule)
    return Model(first=(), layers=tuple(map(tuple, kept)), last=())


def factor_names(family: Family, hf_config: HfConfig, layers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Canonical names of A and B, by the canonical name of the weight that they change."""
    names = {}
    for layer, (_, rule) in _linear_rules(family.model(hf_config, None)).items():
        if layer in layers:
            fused = len(_cut(rule).tensors)
            for position, tensor in enumerate(rule.cut.tensors):
                first = rule.cut.tensors[position - position % fused]
                names[tensor.name] = (_factor(first.name, "A"), _factor(tensor.name, "B"))
    return names


def layers_of_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Full names of the layers whose adapters have these keys in a Megatron checkpoint."""
    return tuple(
        key.removesuffix(INPUT).replace(".experts.experts.", ".experts.") for key in keys if key.endswith(INPUT)
    )


def _matches(pattern: str, name: str) -> bool:
    return pattern == name.rpartition(".")[2] or fnmatchcase(name, pattern)


def _linear_rules(model: Model) -> dict[str, tuple[int, Rule]]:
    """Layer index and rule of every linear layer's weight, by the layer's full name."""
    found = {}
    for index, rules in enumerate(model.layers):
        for rule in rules:
            module = rule.megatron.removesuffix("{expert}").removesuffix(".weight")
            if module != rule.megatron and module.rpartition(".")[2] in LINEAR:
                found[f"{_LAYERS}{index}.{module}"] = index, rule
    return found


def _cut(rule: Rule) -> Cut:
    return rule.cut.cut if isinstance(rule.cut, Experts) else rule.cut


def _factor(weight: str, letter: str) -> str:
    return f"{weight.removesuffix('.weight')}.lora_{letter}.weight"


def _factors(rule: Rule, dim: int) -> tuple[Rule, Rule]:
    """The rules of A and B. A is cut where columns of the weight are, B where rows are; else every rank has it all."""
    cut = _cut(rule)
    first = cut.tensors[0]
    a = Canonical(_factor(first.name, "A"), (dim, first.shape[1]))
    b = [Canonical(_factor(tensor.name, "B"), (tensor.shape[0], dim)) for tensor in cut.tensors]
    if isinstance(cut, Qkv):
        output: Cut = replace(cut, query=b[0], key=b[1], value=b[2])
    elif isinstance(cut, Gated):
        output = Gated(*b)
    elif isinstance(cut, Regrouped):
        output = replace(cut, first=b[0], second=b[1])
    elif isinstance(cut, Joined):
        output = Joined(tuple(replace(part, tensor=tensor) for part, tensor in zip(cut.parts, b, strict=True)))
    elif isinstance(cut, ColumnParallel | Sections):
        output = replace(cut, tensor=b[0])
    else:
        assert isinstance(cut, RowParallel | Replicated), cut
        output = Replicated(b[0])
    return _rule(rule, RowParallel(a) if isinstance(cut, RowParallel) else Replicated(a), INPUT), _rule(
        rule, output, OUTPUT
    )


def _rule(rule: Rule, cut: Cut, suffix: str) -> Rule:
    if isinstance(rule.cut, Experts):
        module, key = rule.local or "", rule.checkpoint or ""
        cut_or_experts: Cut | Experts = Experts(cut, rule.cut.num_experts)
    else:
        module, key, cut_or_experts = rule.megatron, rule.megatron, cut
    return Rule(
        cut_or_experts, module.removesuffix(".weight") + suffix, checkpoint=key.removesuffix(".weight") + suffix
    )
