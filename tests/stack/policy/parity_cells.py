# SPDX-License-Identifier: Apache-2.0
"""Cells of docs/measured/parity.md: policy features as a user configures them, and the families that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

NEMOTRON_H, DENSE, MOE_GPT = (
    ("nemotron_h",),
    ("qwen2", "qwen3", "llama"),
    ("qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe"),
)
GPT, MOE = (*DENSE, *MOE_GPT), (*NEMOTRON_H, *MOE_GPT)
ALL = (*NEMOTRON_H, *GPT)

Settings = Mapping[str, object]
"""Key below `policy` -> value."""


@dataclass(frozen=True)
class Limits:
    """Largest errors, relative but for those of logprobs."""

    loss: float = 1e-6
    gradient: float = 2e-5
    logprob: float = 1e-5


@dataclass(frozen=True)
class Feature:
    """Something to turn on."""

    name: str
    settings: Settings
    families: Sequence[str] = ALL
    num_ranks: int = 1
    plain: Settings = field(default_factory=dict)
    """Settings that the plain computation shares."""
    measured_step: int = 0
    limits: Limits = Limits()
    why_unequal: str | None = None
    """Reason why five steps with it have other losses than without."""

    def __str__(self) -> str:
        return self.name


def _megatron(**settings: object) -> dict[str, object]:
    return {f"megatron_cfg.{key}": value for key, value in settings.items()}


def _packing(**settings: object) -> dict[str, object]:
    return {f"sequence_packing.{key}": value for key, value in settings.items()}


PLAIN: Settings = {
    **_packing(enabled=False),
    **_megatron(
        **{
            "optimizer.use_distributed_optimizer": False,
            "distributed_data_parallel_config.overlap_grad_reduce": False,
            "distributed_data_parallel_config.overlap_param_gather": False,
        }
    ),
}
"""Plain computation for every comparison: one sequence a row, no shards, buckets in flight or overlaps."""
ONE_RANK = _megatron(tensor_model_parallel_size=1, expert_model_parallel_size=1, sequence_parallel=False)

TP2 = _megatron(tensor_model_parallel_size=2, sequence_parallel=True)
PP2 = _megatron(pipeline_model_parallel_size=2)
CP2, CP4 = _megatron(context_parallel_size=2), _megatron(context_parallel_size=4)
EP2, EP4 = _megatron(expert_model_parallel_size=2), _megatron(expert_model_parallel_size=4)
ETP2, ALLGATHER = _megatron(expert_tensor_parallel_size=2), _megatron(moe_token_dispatcher_type="allgather")
UNEVEN, VIRTUAL = _megatron(num_layers_in_first_pipeline_stage=3), _megatron(virtual_pipeline_model_parallel_size=2)
RECOMPUTE = _megatron(activation_checkpointing=True)
ADAPTERS = _megatron(**{"peft.enabled": True, "peft.dim": 4, "peft.alpha": 8})
# Adapters start as zeros, so that half of their factors have no gradient in the first step.
ADAPTED_STEP = 1
BF16 = {"precision": "bfloat16", **_megatron(**{"optimizer.bf16": True})}
REPLAY = {"router_replay.enabled": True}
# Of numbers with 8 bits. Routers that see them choose other experts here and there, whose gradients are others: choices
# are replayed.
BF16_LIMITS = Limits(loss=0.01, gradient=0.1, logprob=0.1)

FEATURES = [
    Feature("packed rows, distributed optimizer with overlaps (DP1)", {}),
    Feature("modified first-fit decreasing", _packing(algorithm="modified_first_fit_decreasing")),
    Feature(
        "first-fit shuffle, largest row first",
        _packing(algorithm="first_fit_shuffle", microbatch_order="largest_first"),
    ),
    Feature("dynamic batching", {**_packing(enabled=False), "dynamic_batching.enabled": True}),
    Feature("other rows in logprob passes", _packing(logprob_mb_tokens=88)),
    Feature("logprobs in chunks", {"logprob_chunk_size": 24, **_megatron(defer_fp32_logits=True)}),
    Feature("fused linear logprobs", _megatron(use_fused_linear_logprobs=True, fused_linear_logprobs_chunk_size=24)),
    Feature("full recomputation", RECOMPUTE),
    Feature("selective recomputation", {**RECOMPUTE, **_megatron(recompute_granularity="selective")}),
    Feature("routers in float64", _megatron(moe_router_dtype="fp64"), MOE),
    Feature(
        "router replay of the model's own choices",
        REPLAY,
        MOE,
        why_unequal=(
            "the routes are those of the starting weights, and without replay routers change their choices "
            "as they learn"
        ),
    ),
    Feature("bfloat16", BF16, DENSE, limits=BF16_LIMITS),
    Feature(
        "bfloat16, choices replayed",
        {**BF16, **REPLAY},
        MOE,
        plain=REPLAY,
        limits=BF16_LIMITS,
        why_unequal="8 bits of precision, and the starting weights' routes",
    ),
    Feature("DP2, distributed optimizer with overlaps", {}, num_ranks=2),
    Feature("TP2 SP", TP2, num_ranks=2),
    Feature("TP2 SP, ETP2", {**TP2, **ETP2}, MOE, 2),
    Feature("EP2, alltoall", EP2, MOE, 2),
    Feature("EP2, allgather", {**EP2, **ALLGATHER}, MOE, 2),
    Feature("PP2", PP2, num_ranks=2),
    Feature("PP2, uneven stages", {**PP2, **UNEVEN}, num_ranks=2),
    Feature("PP2, two virtual stages each", {**PP2, **VIRTUAL}, GPT, 2),
    Feature("CP2", CP2, num_ranks=2),
    Feature("CP4", CP4, num_ranks=4),
    Feature("TP2 SP PP2 EP2", {**TP2, **PP2, **EP2}, MOE, 4),
    Feature("TP2 SP PP2", {**TP2, **PP2}, DENSE, 4),
    Feature("LoRA, TP2 SP EP2 DP2", {**ADAPTERS, **TP2, **EP2}, MOE, 4, plain=ADAPTERS, measured_step=ADAPTED_STEP),
    Feature("LoRA, TP2 SP DP2", {**ADAPTERS, **TP2}, DENSE, 4, plain=ADAPTERS, measured_step=ADAPTED_STEP),
    Feature("TP2 SP PP2 CP2 EP4", {**TP2, **PP2, **CP2, **EP4}, MOE, 8),
    Feature("TP2 SP PP2 CP2", {**TP2, **PP2, **CP2}, DENSE, 8),
]

CELLS = [(model_type, feature) for feature in FEATURES for model_type in feature.families]
"""Cells in order of the number of ranks, which start once for all of them."""


# Beside TP2 and EP2 of grpo_tiny.yaml, which asks for four ranks.
IN_TINY = [
    ("nemotron_h", Feature("plain rows, no shards, no overlaps", PLAIN, num_ranks=4)),
    ("nemotron_h", Feature("one rank", ONE_RANK)),
    *(
        ("nemotron_h", replace(feature, num_ranks=4))
        for feature in FEATURES
        if feature.num_ranks == 1 and feature.settings and "nemotron_h" in feature.families
    ),
    ("nemotron_h", Feature("ETP2", ETP2, num_ranks=4)),
    ("nemotron_h", Feature("allgather", ALLGATHER, num_ranks=4)),
    ("nemotron_h", Feature("PP2", PP2, num_ranks=4)),
    ("nemotron_h", Feature("PP2, uneven stages", {**PP2, **UNEVEN}, num_ranks=4)),
    ("qwen3_moe", Feature("PP2, two virtual stages each", {**PP2, **VIRTUAL}, num_ranks=4)),
    ("nemotron_h", Feature("LoRA", ADAPTERS, num_ranks=4, why_unequal="only the adapters learn")),
    ("nemotron_h", Feature("CP2", CP2, num_ranks=4)),
    ("nemotron_h", Feature("CP4", CP4, num_ranks=8)),
    ("nemotron_h", Feature("PP2 CP2 EP4", {**PP2, **CP2, **EP4}, num_ranks=8)),
]


def _named(name: str) -> Feature:
    return next(feature for feature in FEATURES if feature.name == name)


IN_CI = [
    ("nemotron_h", _named("dynamic batching")),
    ("nemotron_h", _named("selective recomputation")),
    ("nemotron_h", _named("routers in float64")),
    ("mixtral", _named("other rows in logprob passes")),
    ("mixtral", _named("PP2, two virtual stages each")),
    ("qwen2", _named("CP2")),
    ("qwen2", _named("logprobs in chunks")),
    ("nemotron_h", _named("TP2 SP PP2 EP2")),
]
"""Cells whose like no other test of the ordinary suites has."""
