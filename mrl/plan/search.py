# SPDX-License-Identifier: Apache-2.0
"""All layouts of a run on its GPUs: legal ones that fit, fastest first, and the reasons against the others."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.errors import Problem, Problems, spell, value_at
from mrl.config.model import ModelSizes, with_value
from mrl.config.rules import algorithms, layout, training
from mrl.config.schema.run import RunConfig
from mrl.plan.facts import PlanModel, computed_tokens
from mrl.plan.hardware import Gpu
from mrl.plan.memory import RankMemory, all_ranks, engine_memory, memory_apart
from mrl.plan.times import StepTimes, exchange_seconds, step_times
from mrl.plan.traffic import RefitTraffic

_MEGATRON, _ENGINE = "policy.megatron_cfg.", "policy.generation.vllm_cfg."
KEYS = {
    "tp": _MEGATRON + "tensor_model_parallel_size",
    "pp": _MEGATRON + "pipeline_model_parallel_size",
    "vpp": _MEGATRON + "virtual_pipeline_model_parallel_size",
    "cp": _MEGATRON + "context_parallel_size",
    "ep": _MEGATRON + "expert_model_parallel_size",
    "etp": _MEGATRON + "expert_tensor_parallel_size",
    "engine tp": _ENGINE + "tensor_parallel_size",
    "engine ep": _ENGINE + "expert_parallel_size",
    "recompute": _MEGATRON + "recompute_granularity",
    "offload": _MEGATRON + "optimizer.optimizer_offload_fraction",
}

# More chunks keep more activations, and shorten a bubble that is already a quarter.
MOST_CHUNKS = 4
# Limits of layouts that somebody would run: published ones have 4 to 16 experts of 128 on a rank, and split rows from
# 8,192 tokens on; a fuller GPU fails at the first row that differs.
MOST_EXPERTS, FEWEST_TOKENS, MOST_MEMORY = 32, 4096, 0.92


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    values: dict[str, object]
    """Values by the short names of `KEYS`."""
    overrides: list[str]
    worst: RankMemory
    times: StepTimes
    exchange: float


@dataclass(frozen=True)
class Layouts:
    """Result of a search."""

    best: list[Candidate]
    """Layouts that somebody would run, fastest first."""
    num_tried: int
    refused: Counter[str]


def worst_rank(config: RunConfig, model: PlanModel, gpu: Gpu) -> tuple[RankMemory, str | None]:
    """The policy rank with the fullest GPU, and a description of what does not fit; None if all does."""
    ranks, engine = all_ranks(config, model, gpu)
    worst = max(ranks, key=lambda rank: rank.peak)
    misfits = []
    if engine and engine.concurrency(config.policy.max_total_sequence_length) < 1:
        misfits.append("the engine's share of the GPU leaves no cache for one sequence")
    too_large = [
        phase for phase in worst.phases if any(sum(rank.phases[phase].values()) > gpu.memory for rank in ranks)
    ]
    if too_large:
        misfits.append(
            f"phase {too_large[0]} does not fit" if len(too_large) == 1 else f"phases {', '.join(too_large)} do not fit"
        )
    misfits += [
        f"the {name} does not fit on its own nodes"
        for name, parts in memory_apart(config, model).items()
        if sum(parts.values()) > gpu.memory
    ]
    return worst, "; ".join(misfits) or None


def search(config: RunConfig, model: PlanModel, gpu: Gpu, refit: RefitTraffic | None, *, mean_tokens: float) -> Layouts:
    """Every layout of the trainer, each with the fastest engines that fit with it.

    One `refit` stands for all layouts: a schedule for each would take minutes.
    """
    refused: Counter[str] = Counter()
    best: list[Candidate] = []
    engines = list(_legal_engines(config, model.shape, refused))
    # The configured trainer may be illegal, and leave nobody knows how much.
    times = [
        _times(_applied(config, values), model, gpu, refit, mean_tokens, beside=0.0).total.high for values in engines
    ]
    engines = [values for _, values in sorted(zip(times, engines, strict=True), key=lambda pair: pair[0])]
    for layout_values in _trainers(config, model.shape, refused):
        if reason := _unlikely(config, layout_values, model.shape):
            refused[reason] += 1
        elif problem := _illegal(_applied(config, layout_values), model.shape, _MEGATRON):
            refused[problem] += 1
        elif isinstance(found := _lightest(config, layout_values, engines, model, gpu, refit, mean_tokens), Candidate):
            best.append(found)
        else:
            refused[found] += 1
    num_tried = len(best) + refused.total()
    if roomy := [found for found in best if found.worst.peak <= MOST_MEMORY * gpu.memory]:
        refused[f"it leaves less than {1 - MOST_MEMORY:.0%} of the GPU"] += len(best) - len(roomy)
        best = roomy
    ranked = sorted(best, key=lambda found: (found.times.total.high + found.exchange, len(found.overrides)))
    distinct: dict[tuple[object, ...], Candidate] = {}
    for found in ranked:
        # The number of chunks of a stage makes no other layout.
        distinct.setdefault(tuple(value for name, value in found.values.items() if name != "vpp"), found)
    return Layouts(list(distinct.values()), num_tried, +refused)


def _lightest(
    config: RunConfig,
    trainer: dict[str, object],
    engines: list[dict[str, object]],
    model: PlanModel,
    gpu: Gpu,
    refit: RefitTraffic | None,
    mean_tokens: float,
) -> Candidate | str:
    """A trainer layout with least recomputation and offload, and the fastest engines, that fits; else why none does."""
    reason = "no layout of engines is legal"
    for offload, recompute in itertools.product((0.0, 1.0), (None, "selective", "full")):
        for engine_values in engines:
            values = trainer | {"recompute": recompute, "offload": offload} | engine_values
            candidate = _applied(config, values)
            worst, misfit = worst_rank(candidate, model, gpu)
            if misfit is None and (problem := _refused(candidate, model.shape)):
                reason = problem
            elif misfit is None:
                changed = [
                    f"{key}={spell(value)}"
                    for key, value in _settings(values).items()
                    if value_at(config, key) != value
                ]
                tokens = mean_tokens * candidate.policy.train_global_batch_size
                tokens *= computed_tokens(candidate, mean_tokens).share
                times = _times(candidate, model, gpu, refit, mean_tokens)
                return Candidate(values, changed, worst, times, exchange_seconds(candidate, model, gpu, tokens=tokens))
            else:
                reason = misfit
                if worst.peak_phase in ("train", "logprob"):
                    break  # whatever the engines are
    return reason


def _times(
    config: RunConfig,
    model: PlanModel,
    gpu: Gpu,
    refit: RefitTraffic | None,
    mean_tokens: float,
    *,
    beside: float | None = None,
) -> StepTimes:
    engine = engine_memory(config, model, gpu, beside=beside) if config.has_engines else None
    return step_times(config, model, gpu, engine, refit, mean_tokens=mean_tokens)


def _legal_engines(config: RunConfig, sizes: ModelSizes, refused: Counter[str]) -> Iterator[dict[str, object]]:
    if not config.has_engines:
        yield {}
        return
    given = config.policy.generation.vllm_cfg
    for tp in _divisors(config.num_dedicated_slots or config.num_policy_ranks):
        # Groups that share experts only as they are configured.
        for ep in (
            sorted({1, tp, *([given.expert_parallel_size] if tp == given.tensor_parallel_size else [])})
            if sizes.experts
            else (1,)
        ):
            values: dict[str, object] = {"engine tp": tp, "engine ep": ep}
            if problem := _illegal(_applied(config, values), sizes, _ENGINE):
                refused[problem] += 1
            else:
                yield values


def _trainers(config: RunConfig, sizes: ModelSizes, refused: Counter[str]) -> Iterator[dict[str, object]]:
    """Layouts that divide the number of GPUs, with tensor-parallel ranks within a node, where Megatron wants them."""
    ranks = config.num_policy_ranks
    whole, experts = _divisors(ranks), sizes.experts or 1
    eps = [size for size in whole if experts % size == 0]
    tps = [size for size in whole if size <= config.cluster.slots_per_node]
    for tp, pp, cp, ep in itertools.product(tps, whole, whole, eps):
        for etp in _divisors(tp) if sizes.experts else (1,):
            if ranks % (tp * pp * cp):
                refused[f"{ranks} GPUs are no multiple of tp x pp x cp"] += 1
            elif ranks % (ep * etp * pp):
                refused[f"{ranks} GPUs are no multiple of ep x etp x pp"] += 1
            else:
                has_chunks = sizes.model_class == "gpt" and pp > 1
                chunks = (
                    [size for size in _divisors(len(sizes.layers) // pp) if 1 < size <= MOST_CHUNKS]
                    if has_chunks
                    else []
                )
                for vpp in (None, *chunks):
                    yield {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "vpp": vpp}


def _unlikely(config: RunConfig, values: dict[str, object], sizes: ModelSizes) -> str | None:
    """Reason to skip a legal layout of the trainer; None for the configured one and any that is kept."""
    if all(value_at(config, KEYS[name]) == value for name, value in values.items()):
        return None
    ep, cp = values["ep"], values["cp"]
    assert isinstance(ep, int) and isinstance(cp, int)
    if sizes.experts > MOST_EXPERTS * ep and config.num_policy_ranks % (2 * ep) == 0:
        return f"more than {MOST_EXPERTS} experts on a rank"
    if cp > 1 and config.policy.max_total_sequence_length < FEWEST_TOKENS * cp:
        return f"context-parallel ranks share rows of fewer than {FEWEST_TOKENS:,} tokens each"
    return None


def _divisors(total: int) -> list[int]:
    return [size for size in range(1, total + 1) if total % size == 0]


def _illegal(config: RunConfig, sizes: ModelSizes, prefix: str) -> str | None:
    problems = Problems(config)
    layout.check_cluster(config, problems)
    layout.check_layout(config, sizes, problems)
    mine = [problem for problem in problems.merged if problem.key.startswith(prefix)]
    return _short(mine[0]) if mine else None


def _refused(config: RunConfig, sizes: ModelSizes) -> str | None:
    problems = Problems(config)
    training.check_optimizer(config, problems)
    training.check_recomputing(config, sizes, problems)
    training.check_dispatch(config, sizes, problems)
    if config.has_engines:
        algorithms.check_batch(config, problems)
    return _short(problems.merged[0]) if problems.merged else None


def _settings(values: dict[str, object]) -> dict[str, object]:
    settings = {KEYS[name]: value for name, value in values.items() if name != "recompute"}
    if "tp" in values:
        settings[_MEGATRON + "sequence_parallel"] = values["tp"] != 1
    if "recompute" in values:
        settings[_MEGATRON + "activation_checkpointing"] = values["recompute"] is not None
        settings |= {KEYS["recompute"]: values["recompute"]} if values["recompute"] else {}
    if "offload" in values:
        settings[_MEGATRON + "optimizer.optimizer_cpu_offload"] = values["offload"] != 0.0
    return settings


def _applied(config: RunConfig, values: dict[str, object]) -> RunConfig:
    for key, value in _settings(values).items():
        config = with_value(config, key, value)
    return config


def _short(problem: Problem) -> str:
    return f"{problem.key.rpartition('.')[2]}: {problem.rule}"
