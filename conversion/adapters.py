# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv:2106.09685) as tables: which linear layers have one, and how holders cut its factors.

An adapter adds scale * B A to a weight W [out, in], with A [dim, in] and B [out, dim]. The tensors of a fused weight
(q, k, v; gate, up) share one A. Factors are cut as their weight is, so they have rules like any other tensor. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from conversion.boxes import Piece, full
from conversion.cuts import (
    AxisRank,
    Canonical,
    ColumnParallel,
    Cut,
    Cutout,
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

HELD_BY_ENGINES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of attention and dense MLPs, whose adapters an engine can hold beside the weights."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; adapters of another rank are padded with zeros."""

HOLDING_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families of which engines can hold adapters, by model_type."""
_LAYERS = "decoder.layers."


@dataclass(frozen=True)
class HeldAdapters:
    """Adapters that engines hold beside the weights which they change."""

    layers: tuple[str, ...]
    """Full names of the linear layers that have one."""
    dim: int

    @property
    def rank(self) -> int:
        """Rank of the tensors in which vLLM holds the factors."""
        return min(rank for rank in RANKS if rank >= self.dim)

    def modules(self, family: Family, hf_config: HfConfig) -> list[str]:
        """Full names of vLLM's linear layers that get an adapter."""
        rules = _linear_rules(family.model(hf_config, None))
        return [f"model.layers.{rules[name][0]}.{_module(rules[name][1])}" for name in self.layers]


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


@lru_cache(maxsize=16)
def engine_adapter_family(family: Family, held: HeldAdapters) -> Family:
    """The factors as vLLM holds them: for each tensor of a fused layer an A of its own, equal to the others, and a B.

    Only `vllm_layout` is of use. The names end in `lora_a.INDEX` and `lora_b.INDEX`.
    """

    def model(hf_config: HfConfig, padded_vocabulary: int | None) -> Model:
        base = family.model(hf_config, padded_vocabulary)
        rules: list[list[Rule]] = [[] for _ in base.layers]
        for name, (index, rule) in _linear_rules(base).items():
            if name in held.layers:
                rules[index] += _engine_factors(rule, held)
        return Model(first=(), layers=tuple(map(tuple, rules)), last=())

    return replace(family, model=model)


def held_apart(family: Family, hf_config: HfConfig, layers: Sequence[str]) -> list[str]:
    """The layers whose adapters engines cannot hold beside the weights, and take only merged."""
    if hf_config.get("model_type") not in HOLDING_FAMILIES:
        return list(layers)
    rules = _linear_rules(family.model(hf_config, None))
    return [
        name
        for name in layers
        if name.rpartition(".")[2] not in HELD_BY_ENGINES or isinstance(rules[name][1].cut, Experts)
    ]


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


def _module(rule: Rule) -> str:
    return rule.vllm.removesuffix(".weight")


def _engine_factors(rule: Rule, held: HeldAdapters) -> list[Rule]:
    a, b = (factor.cut for factor in _factors(rule, held.dim))
    assert isinstance(a, Cut) and isinstance(b, Cut), rule
    rules = []
    for index, tensor in enumerate(b.tensors):
        for letter, cut, of_slice, dim in (("a", a, a.tensors[0], 0), ("b", b, tensor, 1)):
            name = f"{_module(rule)}.lora_{letter}.{index}"
            rules.append(Rule(cut, "", vllm=name, vllm_cut=_Slice(cut, of_slice, dim, held.rank)))
    return rules


@dataclass(frozen=True)
class _Slice(Cut):
    """One tensor of a fused cut, apart, with zeros behind it up to `size` in the dimension `dim`."""

    fused: Cut
    tensor: Canonical
    dim: int
    size: int

    def megatron(self, shard: AxisRank) -> Cutout:
        raise AssertionError("engines alone hold slices")

    def vllm(self, shard: AxisRank) -> Cutout:
        found = [piece for piece in self.fused.vllm(shard).pieces if piece.name == self.tensor.name]
        first, stop = min(piece.local[0][0] for piece in found), max(piece.local[0][1] for piece in found)
        pieces = tuple(
            Piece(piece.name, piece.box, ((piece.local[0][0] - first, piece.local[0][1] - first), *piece.local[1:]))
            for piece in found
        )
        shape = [stop - first, found[0].local[1][1]]
        held, shape[self.dim] = shape[self.dim], self.size
        padding = list(full(shape))
        padding[self.dim] = (held, self.size)
        return Cutout(tuple(shape), pieces, (tuple(padding),) if held < self.size else ())
