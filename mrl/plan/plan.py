# SPDX-License-Identifier: Apache-2.0
"""A run's plan: memory by phase, bytes, times, and what does not fit; as an object, as lines, and as plain data."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from conversion.schedule import Link
from mrl.config.errors import Problem
from mrl.config.model import model_folder, with_value
from mrl.config.rules.checks import describe_demand, find_problems
from mrl.config.schema.run import RunConfig
from mrl.config.texts import rounded, spell_bytes
from mrl.phases import Phase
from mrl.plan.deadlines import describe_engine_start
from mrl.plan.facts import IMBALANCE, PlanModel, computed_tokens, read_model
from mrl.plan.hardware import GIB, GPUS, Gpu
from mrl.plan.longest_rows import describe_longest, section_at_work, with_least_rows
from mrl.plan.memory import (
    ENGINE_CONTEXT,
    EXCESS,
    PAGE_CACHE,
    ROLLOUTS,
    ROUNDING,
    EngineMemory,
    Parts,
    RankMemory,
    all_ranks,
    cache_bytes,
    describe_limits,
    disk_bytes,
    engine_memory,
    host_memory,
    judge_memory,
    judges_misfit,
    least_parts,
    least_peak,
    memory_apart,
    rollout_bytes,
    saved_bytes,
    stage_states,
)
from mrl.plan.search import Candidate, Layouts, search, worst_rank
from mrl.plan.times import StepTimes, step_times
from mrl.plan.traffic import RefitTraffic, plan_refit

GB = 1e9
NUM_NEAREST, NUM_BEST = 3, 10
LARGEST = max(GPUS.values(), key=lambda gpu: gpu.memory)


@dataclass(frozen=True)
class Plan:
    """Predicted needs of a run."""

    config: RunConfig
    gpu: Gpu
    model: PlanModel
    worst: RankMemory
    misfit: str | None
    engine: EngineMemory | None
    host: Parts
    """Host memory of each node, by what holds it."""
    host_misfit: str | None
    """Description of the host memory that a node lacks; None if it has enough, or its memory is not given."""
    node_memory: float | None
    """Host memory of a node in bytes, if it is given."""
    refit: RefitTraffic | None
    times: StepTimes


def mean_tokens_of(config: RunConfig, given: float | None) -> float:
    """Assumed tokens of a rollout with its prompt: half of the longest unless the user gives a number.

    Raises:
        ValueError: no rollout of this config has as many tokens.
    """
    longest = config.policy.max_total_sequence_length
    if given is not None and not 1 <= given <= longest:
        raise ValueError(
            f"--mean-tokens={rounded(given)}: a rollout with its prompt has 1 to {longest} tokens "
            f"(policy.max_total_sequence_length={longest}); give a number within, or raise that key"
        )
    return longest / 2 if given is None else given


def with_config_json(config: RunConfig) -> RunConfig:
    """Replaces an id of the Hub by a folder that holds the model's config.json."""
    model = config.policy.model_name
    try:
        return with_value(config, "policy.model_name", str(model_folder(model, with_weights=False)))
    except ValueError as error:
        raise ValueError(
            f"policy.model_name={model}: a plan needs the model's config.json alone, and finds none: put it into a "
            f"folder, and set policy.model_name=FOLDER{_collected(model)}. Cause: {error}"
        ) from error


def _collected(model: str) -> str:
    """A text that names the file of a checkout that has the config.json of this id; "" if it has none."""
    file = Path(__file__).parents[2] / "scripts/bench/models/hub.json"
    groups = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    return f" ({file} has it: `config` beside `ids`)" if any(model in group["ids"] for group in groups) else ""


def problems_of(config: RunConfig) -> list[Problem]:
    """Lists the rules that a config breaks, except those about files that this machine lacks."""
    return [problem for problem in find_problems(config) if problem.kind == "refused"]


def make_plan(
    config: RunConfig, gpu: Gpu, *, mean_tokens: float | None = None, node_memory: float | None = None
) -> Plan:
    """The plan of a config that no rule refuses. `node_memory` is the host memory of a node, if it is known."""
    model = read_model(config)
    engine = engine_memory(config, model, gpu) if config.has_engines else None
    worst, misfit = worst_rank(config, model, gpu)
    misfit = "; ".join(filter(None, [misfit, judges_misfit(config, gpu)])) or None
    refit = plan_refit(config, model) if config.has_engines else None
    times = step_times(config, model, gpu, engine, refit, mean_tokens=mean_tokens_of(config, mean_tokens))
    host = fullest_host(config, model)
    lacking = find_host_misfit(host, node_memory)
    return Plan(config, gpu, model, worst, misfit, engine, host, lacking, node_memory, refit, times)


def fullest_host(config: RunConfig, model: PlanModel) -> Parts:
    """Host memory of a node whose ranks all have the pipeline stage that needs most."""
    stages = range(config.policy.megatron_cfg.pipeline_model_parallel_size)
    found = [host_memory(config, model, stage_states(config, model, stage)) for stage in stages]
    return max(found, key=lambda parts: sum(parts.values()))


def _kept(host: Parts) -> Parts:
    return {name: size for name, size in host.items() if name not in (PAGE_CACHE, ROLLOUTS, ROUNDING)}


def find_host_misfit(host: Parts, node_memory: float | None) -> str | None:
    """Description of the host memory that a node of `node_memory` bytes surely lacks.

    The page cache does not count, as the kernel gives it back, nor do rollouts, which are counted at the greatest
    length, nor what pinned memory is rounded up by on average.
    """
    held = _kept(host)
    if node_memory is None or sum(held.values()) <= node_memory:
        return None
    return (
        f"a node needs at least {sum(held.values()) / GIB:.1f} GiB of host memory and has {node_memory / GIB:.1f} "
        f"GiB: {spell_parts(held)}; use nodes with more memory, or more nodes, so that each holds less"
    )


def search_layouts(
    config: RunConfig, gpu: Gpu, refit: RefitTraffic | None, *, mean_tokens: float | None = None
) -> Layouts:
    """All layouts of a run on its GPUs."""
    return search(config, read_model(config), gpu, refit, mean_tokens=mean_tokens_of(config, mean_tokens))


def prediction(config: RunConfig, gpu: Gpu | None, node_memory: float | None = None) -> str:
    """One line for the start of a run. `gpu` is None if unknown: nothing is compared then, and the line leaves out
    phase generate, whose cache fills a GPU.

    Raises:
        ValueError: a phase surely exceeds the GPU: see `least_parts`, with balanced experts, and with rows that are
            sure to occur: of one sequence where rows are padded, full ones where they are filled. Or a node surely
            lacks host memory.
    """
    model = read_model(config)
    if gpu is not None:
        _check_gpu(config, model, gpu)
    if gpu is not None and (lacking := judges_misfit(config, gpu)):
        raise ValueError(f"{lacking}; raise its tensor_parallel_size or gpu_memory_utilization, or lower that")
    if lacking := find_host_misfit(fullest_host(config, model), node_memory):
        raise ValueError(f"cluster.num_nodes={config.cluster.num_nodes}: {lacking}")
    if gpu is None:
        # Limits of engines follow the cache, and barely change what other phases need.
        phases = predicted_bytes(config, None)
        phase = max(phases, key=lambda phase: phases[phase])
        engines = [
            "phase generate fills policy.generation.vllm_cfg.gpu_memory_utilization="
            f"{config.policy.generation.vllm_cfg.gpu_memory_utilization:g} of a GPU"
        ]
        return "; ".join(
            [
                f"Plan: phase {phase} needs most, about {phases[phase] / GIB:.0f} GiB of a GPU "
                "(this host has none to compare with; --check and `python -m mrl.plan` take --gpu)",
                *(engines if config.has_engines else []),
            ]
        )
    rows = describe_longest(config, model, gpu)
    worst, misfit = worst_rank(config, model, gpu)
    engines = [f"engines take {describe_limits(config, gpu)}"] if config.has_engines else []
    needs = (
        f"Plan: phase {worst.peak_phase} needs most, about {worst.peak / GIB:.0f} GiB of a GPU ({gpu.name}: "
        f"{gpu.memory_gib:.1f} GiB)"
    )
    doubt = f"it may not fit: {misfit} by estimates that are up to {EXCESS - 1:.0%} high" if misfit else None
    return "; ".join([needs, *engines, *filter(None, [doubt, rows])])


def _check_gpu(config: RunConfig, model: PlanModel, gpu: Gpu) -> None:
    """Raises ValueError if a phase surely exceeds the GPU."""
    least = max(all_ranks(with_least_rows(config), model, gpu, imbalance=1.0)[0], key=least_peak)
    if least_peak(least) > gpu.memory:
        phase = max(least.phases, key=lambda phase: sum(least_parts(least.phases[phase]).values()))
        parts = {name: size for name, size in least.phases[phase].items() if name in least_parts(least.phases[phase])}
        rows = describe_longest(config, model, gpu)
        found = nearest(search_layouts(with_config_json(config), gpu, None))
        fits = (
            "; it fits with: " + "; or ".join(" ".join(one.overrides) for one in found)
            if found
            else "; no layout fits on these GPUs"
        )
        raise ValueError(
            f"{section_at_work(config, phase)}.megatron_cfg: phase {phase} needs at least "
            f"{least_peak(least) / GIB:.1f} GiB of a GPU on pipeline stage {least.stage}, and {gpu.name} has "
            f"{gpu.memory_gib:.1f} GiB: {spell_parts(parts)}, an estimate that is {EXCESS - 1:.0%} high at most{fits}"
            + (f"; {rows}" if rows else "")
        )


def predicted_bytes(config: RunConfig, gpu: Gpu | None) -> dict[Phase, float]:
    """Bytes of a GPU in each phase, on the policy rank that needs most then. Without `generate` if the GPU is unknown,
    as its cache fills that; empty for a run without GPUs."""
    if not config.cluster.gpus_per_node:
        return {}
    ranks, _ = all_ranks(config, read_model(config), gpu or LARGEST)
    return {
        phase: max(sum(rank.phases[phase].values()) for rank in ranks)
        for phase in ranks[0].phases
        if gpu or phase != "generate"
    }


def spell_parts(parts: Parts) -> str:
    """Parts of a memory, largest first."""
    return ", ".join(
        f"{name} {size / GIB:.1f}"
        for name, size in sorted(parts.items(), key=lambda item: -item[1])
        if size > 0.005 * GIB
    )


def describe(plan: Plan) -> list[str]:
    """The plan as lines of text: memory in GiB, traffic and files in GB."""
    config, gpu, worst = plan.config, plan.gpu, plan.worst
    stages = config.policy.megatron_cfg.pipeline_model_parallel_size
    lines = [
        (
            f"GPU: {gpu.name}, {gpu.memory_gib} GiB usable; {config.num_slots} of them. Model: "
            f"{plan.model.num_parameters:,} parameters"
        ),
        f"Memory of the fullest policy rank (pipeline stage {worst.stage} of {stages}), GiB; experts of the "
        f"busiest rank get {IMBALANCE} times the mean:",
    ]
    for phase, parts in worst.phases.items():
        mark = "  <- does not fit" if sum(parts.values()) > gpu.memory else ""
        lines.append(f"  {phase:<11}{sum(parts.values()) / GIB:6.1f}  {spell_parts(parts)}{mark}")
    for name, parts in memory_apart(config, plan.model).items():
        mark = "  <- does not fit" if sum(parts.values()) > gpu.memory else ""
        lines.append(
            f"The {name}, on {config.num_ranks_of(name)} GPUs of its own, GiB: {sum(parts.values()) / GIB:.1f}  "
            f"{spell_parts(parts)}{mark}"
        )
    for name, engine in judge_memory(config, gpu).items():
        judge = config.judges[name]
        number = judge.num_nodes * config.cluster.slots_per_node // judge.num_workers
        lines.append(f"Judge {name}, {number} engines on {judge.num_nodes} nodes of its own:")
        lines += [f"  {line}" for line in _engine_lines(gpu, engine, judge.gpu_memory_utilization, judge.max_model_len)]
    if plan.engine:
        vllm, length = config.policy.generation.vllm_cfg, config.policy.max_total_sequence_length
        of_engine = _engine_lines(gpu, plan.engine, vllm.gpu_memory_utilization, length)
        lines += [*of_engine, describe_engine_start(config, plan.engine.limits.num_seqs)]
    held = ", ".join(f"{name} {size / GB:.0f}" for name, size in plan.host.items())
    limit = (
        ""
        if plan.node_memory is None
        else f"; surely {sum(_kept(plan.host).values()) / GB:.0f}, of {plan.node_memory / GB:.0f} that a node has"
    )
    lines.append(f"Host memory of the first node, GB: {sum(plan.host.values()) / GB:.0f} ({held}){limit}")
    saved, (disk, kept) = sum(saved_bytes(config, plan.model).values()), disk_bytes(config, plan.model)
    checkpoints = describe_demand(kept, saved, disk) if config.checkpointing.enabled else "no checkpoints"
    lines.append(f"Disk: {checkpoints}; the cache of converted models {spell_bytes(cache_bytes(plan.model))}")
    if plan.refit:
        moved = plan.refit.link_bytes
        per_gpu = ", ".join(f"{moved[link] / config.num_slots / GB:.2f} {name}" for link, name in _LINKS)
        lines.append(
            f"Refit, GB a GPU: {per_gpu}; {plan.refit.num_rounds} rounds. Rollouts of a step: "
            f"{rollout_bytes(config) / GB:.2f} GB at most"
        )
    total, mean = plan.times.total, plan.times.mean_tokens
    share = computed_tokens(config, mean).share
    shared = "" if share == 1 else f", {share:.0%} of which are computed, as rows share prefixes"
    lines.append(
        f"Step with {mean:,.0f} tokens a rollout{shared}: {total.low:.1f} to {total.high:.1f} s, mostly "
        f"{plan.times.bottleneck}"
    )
    lines += [f"  {name:<27}{phase.low:7.1f} to {phase.high:7.1f} s" for name, phase in plan.times.phases.items()]
    return lines


_LINKS: tuple[tuple[Link, str], ...] = (
    ("gpu", "from its own memory"),
    ("node", "within the node"),
    ("network", "between nodes"),
)


def _engine_lines(gpu: Gpu, engine: EngineMemory, asked: float, length: int) -> list[str]:
    fits = engine.concurrency(length)
    less = f" (not {asked:g}, as the policy's weights are there, too)" if engine.share < asked else ""
    return [
        f"Engine worker, GiB: {engine.share * gpu.memory_gib:.1f}{less} = weights {engine.weights / GIB:.2f}, "
        f"activations {engine.activations / GIB:.1f}, graphs {engine.graphs / GIB:.1f}, "
        f"outside torch {ENGINE_CONTEXT / GIB:.1f}, cache "
        f"{engine.cache / GIB:.1f}",
        f"Cache: blocks of {engine.layout.block_tokens} tokens, {engine.layout.block_bytes:,} bytes; "
        f"{engine.layout.state_blocks} more for a sequence's states; {fits:.1f} sequences of {length:,} tokens "
        f"fit, max_num_seqs={engine.limits.num_seqs}, max_num_batched_tokens={engine.limits.num_tokens}",
    ]


def describe_candidates(title: str, candidates: list[Candidate]) -> list[str]:
    """Lists layouts, one per line."""
    lines = [title]
    for found in candidates:
        sizes = " ".join(f"{name}={value}" for name, value in found.values.items() if value is not None)
        total = found.times.total
        lines.append(
            f"  {sizes}: {found.worst.peak / GIB:.0f} GiB, {total.low:.1f} to {total.high:.1f} s, exchange up to "
            f"{found.exchange:.2f} s"
        )
        lines.append(f"    {' '.join(found.overrides) or '(as configured)'}")
    return lines


def nearest(found: Layouts) -> list[Candidate]:
    """The layouts that fit with the fewest keys changed."""
    return sorted(found.best, key=lambda one: (len(one.overrides), one.times.total.high))[:NUM_NEAREST]


def as_data(plan: Plan, found: Layouts | None = None) -> dict[str, object]:
    """The plan as plain data: bytes and seconds."""
    data: dict[str, object] = {
        "gpu": dataclasses.asdict(plan.gpu),
        "num_gpus": plan.config.num_slots,
        "num_parameters": plan.model.num_parameters,
        "stage": plan.worst.stage,
        "memory": plan.worst.phases,
        "models_apart": memory_apart(plan.config, plan.model),
        "fits": plan.misfit is None and plan.host_misfit is None,
        "misfit": plan.misfit or plan.host_misfit,
        "engine": dataclasses.asdict(plan.engine) if plan.engine else None,
        "host": plan.host,
        "checkpoint_bytes": sum(saved_bytes(plan.config, plan.model).values()),
        "disk_bytes": disk_bytes(plan.config, plan.model)[0],
        "cache_bytes": cache_bytes(plan.model),
        "judges": {name: dataclasses.asdict(engine) for name, engine in judge_memory(plan.config, plan.gpu).items()},
        "refit": dataclasses.asdict(plan.refit) if plan.refit else None,
        "times": {name: dataclasses.asdict(phase) for name, phase in plan.times.phases.items()},
        "mean_tokens": plan.times.mean_tokens,
    }
    if found:
        data["layouts"] = [
            {
                "overrides": one.overrides,
                "memory": one.worst.peak,
                "seconds": dataclasses.asdict(one.times.total),
                "values": one.values,
            }
            for one in found.best
        ]
        data["refused"] = dict(found.refused)
    return data
