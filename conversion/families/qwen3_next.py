# SPDX-License-Identifier: Apache-2.0
"""qwen3_next (Qwen3-Next-80B-A3B): gated delta nets, every fourth layer gated attention, gated experts in each.

qwen3_5.py has the same layers, with other projections in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from conversion.cuts import (
    Canonical,
    ColumnParallel,
    Cut,
    Qkv,
    Regrouped,
    Replicated,
    RowParallel,
    Section,
    Sections,
)
from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model, Rule
from conversion.families.rope import read_rope
from conversion.families.settings import check_multiple, check_settings, positive_integer

SUPPORTED = decoder.COMMON_SUPPORTED | {
    "attn_output_gate": (True, None),
    "layer_scale": (False, None),
    "linear_conv_kernel_dim": (4,),
    "output_gate_type": ("silu", "swish", None),
    "qkv_bias": (False, None),
}
_SIZE_KEYS = tuple(
    f"linear_{name}"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
)
KINDS = ("linear_attention", "full_attention")
# transformers' default.
ROTATED = 0.25


@dataclass(frozen=True)
class Sizes:
    """Heads of a gated delta net and their widths."""

    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Width of the convolution."""

    @classmethod
    def of(cls, hf_config: HfConfig) -> Sizes:
        sizes = cls(*(positive_integer(hf_config, key) for key in _SIZE_KEYS))
        check_multiple(hf_config, "linear_num_value_heads", "linear_num_key_heads")
        return sizes

    @property
    def keys(self) -> int:
        return self.heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> tuple[Section, ...]:
        """Sections of the convolution's channels."""
        rows = {"query": self.keys, "key": self.keys, "value": self.values}
        return tuple(Section(label, size, self.heads) for label, size in rows.items())

    def section(self, label: str, rows: int) -> Section:
        return Section(label, rows, self.heads)


Projections = Callable[[str, Sizes, int], tuple[Rule, ...]]
"""Rules of the input projections: of the prefix of their names, the sizes, and the model's hidden size."""


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    # vLLM's model has no tied form.
    check_settings(hf_config, SUPPORTED | {"tie_word_embeddings": (False, None)})
    moe = replace(
        decoder.softmax_experts(hf_config),
        shared=positive_integer(hf_config, "shared_expert_intermediate_size"),
        shared_name="shared_expert",
        has_shared_gate=True,
        is_shared_whole_in_groups=True,
    )
    rope = read_rope(hf_config, percent=ROTATED)
    return decoder.Decoder.of(hf_config, qk_norm=True, moe=moe, rope=rope, kinds=KINDS)


def _is_linear(hf_config: HfConfig) -> list[bool]:
    """Tells for each layer whether it is a gated delta net; config.json lists the layers, or says how often not."""
    num_layers, given = positive_integer(hf_config, "num_hidden_layers"), hf_config.get("layer_types")
    if given is None:
        interval = positive_integer(hf_config, "full_attention_interval", 4)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ValueError(
            f"config.json: layer_types={given!r} must be a list with a name for each of {num_layers} layers"
        )
    return [kind == KINDS[0] for kind in given]


def delta_family(read: Callable[[HfConfig], decoder.Decoder], projections: Projections, *, num_at_end: int) -> Family:
    """The family of decoders of gated delta nets and gated attention whose config.json `read` understands."""

    def model(hf_config: HfConfig, padded_vocabulary: int | None) -> Model:
        found, sizes, layers = read(hf_config), Sizes.of(hf_config), list[tuple[Rule, ...]]()
        for index, is_linear in enumerate(_is_linear(hf_config)):
            prefix = f"model.layers.{index}."
            mixer = _delta_net(prefix, sizes, found.hidden, projections) if is_linear else _attention(prefix, found)
            layers.append((*mixer, *decoder.mlp(prefix, found, index)))
        return decoder.with_ends(tuple(layers), found, padded_vocabulary)

    def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
        return decoder.megatron_arguments(
            read(hf_config),
            layernorm_zero_centered_gamma=True,
            attention_output_gate=True,
            linear_attention_freq=[int(is_linear) for is_linear in _is_linear(hf_config)],
            **dict(zip(_SIZE_KEYS, astuple(Sizes.of(hf_config)), strict=True)),
        )

    return Family(
        model,
        megatron_arguments,
        model_class="gpt",
        has_ends_everywhere=True,
        num_at_end=num_at_end,
        left_out="mtp.",
        held_otherwise="the norm in a delta net less one",
    )


def _attention(prefix: str, found: decoder.Decoder) -> tuple[Rule, ...]:
    """Attention whose query projection has a gate beside each head."""
    rules = []
    for rule in decoder.attention(prefix, found):
        if isinstance(rule.cut, Qkv):
            query = rule.cut.query
            gated = Canonical(query.name, (2 * query.shape[0], *query.shape[1:]))
            rule = replace(rule, cut=replace(rule.cut, query=gated, has_gate=True))
        rules.append(rule)
    return tuple(rules)


def _delta_net(prefix: str, sizes: Sizes, hidden: int, projections: Projections) -> tuple[Rule, ...]:
    """Norm and gated delta net (arXiv:2412.06464)."""
    hf, norm = prefix + "linear_attn.", "input_layernorm.weight"

    def tensor(name: str, *shape: int) -> Canonical:
        return Canonical(hf + name, shape)

    channels = 2 * sizes.keys + sizes.values
    return (
        Rule(
            Replicated(Canonical(prefix + norm, (hidden,))),
            "self_attention.in_proj.layer_norm_weight",
            norm,
            local=norm,
        ),
        *projections(hf, sizes, hidden),
        _same("conv1d.weight", Sections(tensor("conv1d.weight", channels, 1, sizes.width), sizes.mixed)),
        _same("dt_bias", ColumnParallel(tensor("dt_bias", sizes.value_heads))),
        _same("A_log", ColumnParallel(tensor("A_log", sizes.value_heads))),
        Rule(
            Replicated(tensor("norm.weight", sizes.value_dim)),
            "self_attention.out_norm.weight",
            "linear_attn.norm.weight",
        ),
        _same("out_proj.weight", RowParallel(tensor("out_proj.weight", hidden, sizes.values))),
    )


def _same(name: str, cut: ColumnParallel | RowParallel | Sections) -> Rule:
    return Rule(cut, f"self_attention.{name}", f"linear_attn.{name}")


def projection_rules(whole: Cut, wide: Cut, narrow: Cut) -> tuple[Rule, ...]:
    """The rule of Megatron's one tensor and of vLLM's first, and that of vLLM's second."""
    return (
        Rule(whole, "self_attention.in_proj.weight", "linear_attn.in_proj_qkvz.weight", wide),
        Rule(narrow, "", "linear_attn.in_proj_ba.weight"),
    )


def _projections(hf: str, sizes: Sizes, hidden: int) -> tuple[Rule, ...]:
    """Rules of projections whose rows the file has by key head: of query, key, value and gate, and of beta and alpha.

    vLLM has them so, too. Megatron has one tensor with all queries first, then all keys, and so on.
    """
    wide = Canonical(hf + "in_proj_qkvz.weight", (2 * sizes.keys + 2 * sizes.values, hidden))
    narrow = Canonical(hf + "in_proj_ba.weight", (2 * sizes.value_heads, hidden))
    gates = tuple(sizes.section(label, sizes.value_heads) for label in ("beta", "alpha"))
    whole = Regrouped(wide, narrow, (*sizes.mixed, sizes.section("z", sizes.values)), gates)
    return projection_rules(whole, ColumnParallel(wide), ColumnParallel(narrow))


FAMILY = delta_family(_decoder, _projections, num_at_end=1)
