# SPDX-License-Identifier: Apache-2.0
"""Memory of a run by phase: the rank that needs most of its GPU, host memory, and disk space."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from conversion.schedule import NUM_BUFFERS
from mrl.config.judge_runs import judge_run
from mrl.config.model import with_value
from mrl.config.rules.checks import checkpoint_bytes, num_kept_at_most
from mrl.config.schema.generation import EngineLimits
from mrl.config.schema.run import RunConfig
from mrl.phases import PHASES, WORKERS, ModelName, Phase, is_frozen, role_of
from mrl.plan.activations import BF16, FP32, part_bytes
from mrl.plan.engine import CacheLayout, cache_layout, forward_bytes, sampler_bytes
from mrl.plan.facts import IMBALANCE, PlanModel, num_microbatches, read_model, row_of, state_rules
from mrl.plan.hardware import GIB, Gpu
from mrl.plan.peaks import Stage, logits_bytes, microbatches_in_flight, persistent_bytes, train_peak
from mrl.plan.states import PINNED_ROUNDING, States, state_bytes

# Outside of torch's allocator: CUDA context, NCCL's buffers, cuDNN. Cards of Megatron-Bridge keep 3 to 6 GB of 80 GB
# free.
POLICY_CONTEXT, ENGINE_CONTEXT = 2.5e9, 0.7e9
# vLLM's memory outside of torch: 1.34 GiB with a model of 35 billion parameters (vLLM issue 50722).
GRAPHS = 1.34 * GIB
# Reserved but not allocated, as a share of what is allocated: 2 to 8 % on the cards of Megatron-Bridge.
SLACK = 0.05
# What a plan of a GPU may exceed a published run by: 7.0 % at most, of 86 runs (docs/plan.md).
EXCESS = 1.08
# Steps of fewer tokens read the weights too often while prompts are computed.
FEWEST_TOKENS = 2048
_WORKSPACE = 32 * 2**20
# Buffers differ by a few bytes with the assumed load of experts.
_MARGIN = 64 * 2**20
# Bytes of a logit without gradient: `tests/long/test_memory_long.py`, at 65,536 columns.
_FORWARD_LOGIT = 5
_PASSING = ("gradients", "optimizer", "activations", "logits or one layer")

# A layer's weights that are made, those of one that waits for further rounds, and its FP8 values twice, for the proof.
_STAGED_LAYERS = 3

Parts = dict[str, float]


@dataclass(frozen=True)
class EngineMemory:
    """Memory of a colocated or dedicated engine on its GPU."""

    weights: float
    activations: float
    """Activations as vLLM measures them at its start, to give the cache the rest."""
    unmeasured: float
    """Further logits for checking all proposed tokens."""
    graphs: float
    cache: float
    layout: CacheLayout
    limits: EngineLimits
    share: float
    """Share of the GPU that all this takes: `gpu_memory_utilization`, or what a policy beside it leaves, if that is
    less.
    """
    staging: float = 0.0
    """Weights in bfloat16 of which a refit makes FP8."""

    def concurrency(self, tokens: int) -> float:
        """Sequences of that many tokens whose cache fits at once."""
        return self.layout.concurrency(self.cache, tokens) if self.cache > 0 else 0.0


@dataclass(frozen=True)
class RankMemory:
    """The GPU of a policy rank of one pipeline stage, by phase."""

    stage: int
    phases: dict[Phase, Parts]

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.peak_phase].values())


def engine_memory(config: RunConfig, model: PlanModel, gpu: Gpu, *, beside: float | None = None) -> EngineMemory:
    """An engine worker's memory under `gpu_memory_utilization`; the cache is negative if that is too little.

    The policy's weights stay on a shared GPU, so there the engine takes no more than they leave. `beside` are the bytes
    that it has to leave; None stands for `beside_engine`.
    Limits that the config leaves open leave room for the longest sequence by shorter steps, and let in no more
    sequences than the cache has first blocks and states for.
    """
    vllm, limits = config.policy.generation.vllm_cfg, config.engine_limits
    left = gpu.memory - (beside_engine(config, model) if beside is None else beside)

    def limited(num_seqs: int, num_tokens: int) -> EngineMemory:
        return _limited(config, model, gpu, EngineLimits(num_seqs, num_tokens), left)

    least, num_tokens = vllm.max_num_seqs or 1, limits.num_tokens
    while (
        vllm.max_num_batched_tokens is None
        and num_tokens > FEWEST_TOKENS
        and limited(least, num_tokens).concurrency(vllm.max_model_len) < 1
    ):
        num_tokens //= 2
    most = min(limits.num_seqs, max(1, num_tokens // (1 + config.policy.generation.num_proposed_tokens)))
    counts = range(least, max(least, most) + 1)
    lacking = bisect_left(counts, True, key=lambda number: limited(number, num_tokens).concurrency(1) < number)
    return limited(counts[max(0, lacking - 1)], num_tokens)


def with_limits(config: RunConfig, gpu: Gpu | None) -> RunConfig:
    """The config with the limits of its engines filled in; without a GPU those that the rollouts need."""
    engine = engine_memory(config, read_model(config), gpu) if gpu else None
    limits = engine.limits if engine else config.engine_limits
    if engine and 0 < engine.share < config.policy.generation.vllm_cfg.gpu_memory_utilization:
        config = with_value(config, "policy.generation.vllm_cfg.gpu_memory_utilization", engine.share)
    config = with_value(config, "policy.generation.vllm_cfg.max_num_seqs", limits.num_seqs)
    return with_value(config, "policy.generation.vllm_cfg.max_num_batched_tokens", limits.num_tokens)


def judge_memory(config: RunConfig, gpu: Gpu) -> dict[str, EngineMemory]:
    """Memory of an engine worker of each judge, by the judge's name."""
    runs = {name: judge_run(config, name) for name in config.judges} if config.has_engines else {}
    return {name: engine_memory(run, read_model(run), gpu) for name, run in runs.items()}


def judges_misfit(config: RunConfig, gpu: Gpu) -> str | None:
    """Description of judges whose engines cannot hold one question, or None."""
    found = [
        f"judge {name} has no cache for one question of judges.{name}.max_model_len={config.judges[name].max_model_len}"
        for name, memory in judge_memory(config, gpu).items()
        if memory.concurrency(config.judges[name].max_model_len) < 1
    ]
    return "; ".join(found) or None


def describe_limits(config: RunConfig, gpu: Gpu | None) -> str:
    """Limits of an engine, in words."""
    vllm = with_limits(config, gpu if config.cluster.gpus_per_node else None).policy.generation.vllm_cfg
    each = " in each group" if vllm.num_groups > 1 else ""
    asked, given = config.policy.generation.vllm_cfg.gpu_memory_utilization, vllm.gpu_memory_utilization
    less = (
        f", in {given:.2f} of a GPU and not {asked:g}, which the policy's weights beside them leave"
        if given < asked
        else ""
    )
    return (
        f"up to {vllm.max_num_seqs:,} rollouts at once in steps of up to {vllm.max_num_batched_tokens:,} "
        f"tokens{each}{less}"
    )


def beside_engine(config: RunConfig, model: PlanModel) -> float:
    """Bytes of a GPU that policy ranks keep while an engine samples on it; 0 of a dedicated engine."""
    if not config.policy.generation.colocated.enabled:
        return 0.0
    stages = range(config.policy.megatron_cfg.pipeline_model_parallel_size)
    return max(sum(rank_memory(config, model, stage, None).phases["generate"].values()) for stage in stages)


def _limited(config: RunConfig, model: PlanModel, gpu: Gpu, limits: EngineLimits, left: float) -> EngineMemory:
    generation, shape = config.policy.generation, model.shape
    vllm, num_proposed = generation.vllm_cfg, generation.num_proposed_tokens
    tp, has_mamba = vllm.tensor_parallel_size, shape.mamba_heads > 0
    element = BF16 if vllm.loaded_precision == "bfloat16" else FP32
    ssm = generation.vllm_kwargs.get("mamba_ssm_cache_dtype", "auto")
    ssm = model.hf_config.get("mamba_ssm_cache_dtype", "float32") if ssm == "auto" else ssm
    layout = cache_layout(
        shape,
        tp,
        element_bytes=element if vllm.kv_cache_dtype == "auto" else BF16,
        ssm_bytes=FP32 if ssm == "float32" else BF16,
        shares_prefixes=has_mamba and vllm.enable_prefix_caching is not False,
        num_proposed=num_proposed,
        drafter=model.mtp_pattern if generation.parallel.has_drafter else "",
        pp=vllm.pipeline_parallel_size,
    )
    weights, staging = model.engine_bytes(generation.parallel, vllm.loaded_precision), 0.0
    if vllm.is_fp8:
        saved, largest = model.fp8_bytes(generation)
        weights -= saved
        staging = _STAGED_LAYERS * largest
    # vLLM always measures with one proposal per sequence (`GPUModelRunner._dummy_sampler_run`).
    measured, all_rows = (limits.num_seqs * (1 + number) for number in (min(num_proposed, 1), num_proposed))
    passing = forward_bytes(
        shape, tp, batched_tokens=limits.num_tokens, ep=vllm.expert_parallel_size, num_groups=vllm.num_groups
    )
    activations = passing + sampler_bytes(shape, measured)
    graphs = 0.0 if vllm.enforce_eager else GRAPHS
    unmeasured = sampler_bytes(shape, all_rows - measured)
    given = min(vllm.gpu_memory_utilization * gpu.memory, left - unmeasured - staging - _MARGIN)
    cache = given - weights - activations - graphs - ENGINE_CONTEXT
    return EngineMemory(weights, activations, unmeasured, graphs, cache, layout, limits, given / gpu.memory, staging)


@dataclass(frozen=True)
class Work:
    """GPU memory that a rank needs for one model."""

    states: States
    persistent: float
    forward: Parts
    """Further memory in a pass without gradients."""
    train: Parts


def work_of(
    config: RunConfig, model: PlanModel, pp_rank: int, name: ModelName = "policy", *, imbalance: float = IMBALANCE
) -> Work:
    """Memory of a rank of the model of this name at a pipeline stage."""
    section, shape = config.model(name), model.shape
    megatron = section.megatron_cfg
    parallel = megatron.parallel
    is_last = pp_rank == megatron.parallel.pp - 1
    chunk_tokens = section.output_chunk_tokens
    states = stage_states(config, model, pp_rank, name)
    counts = microbatches_in_flight(pp_rank, parallel.pp, parallel.vpp, num_microbatches(config, name))
    chunks = [
        [shape.layers[i] for i in parallel.layers_of(pp_rank, len(shape.layers), chunk)]
        for chunk in range(parallel.vpp)
    ]
    steps = config.mtp_steps_of(name) if is_last else 0
    chunks[-1] = chunks[-1] + [*model.mtp_pattern] * steps
    stage = Stage(list(zip(chunks, counts, strict=True)), is_last, extra_outputs=steps)
    row, forward_row = (
        row_of(config, name, is_training=is_training, imbalance=imbalance) for is_training in (True, False)
    )
    persistent = persistent_bytes(
        shape, stage, row, pp=parallel.pp, workspaces=(7 if shape.experts else 3) * _WORKSPACE
    )
    has_logits = is_last and not _has_head(config, name)
    logits = logits_bytes(shape, stage, row, chunk_tokens=chunk_tokens) if has_logits else 0.0
    train = train_peak(states, shape, stage, row, logits=logits, persistent=persistent)
    widest = max(
        sum(part_bytes(shape, letter, forward_row).values()) for layer in set(shape.layers) for letter in layer
    )
    columns = min(chunk_tokens or forward_row.tokens, forward_row.tokens) * shape.vocabulary / row.tp
    forward = max(widest, _FORWARD_LOGIT * columns if has_logits else 0.0)
    wider = 1 if section.precision == "bfloat16" else 2
    if steps:
        # For each MTP step the joined input, and the output layer's gathered input; during an update a copy of the
        # embedding.
        gathered = row.tokens if row.is_sequence_parallel else 0
        train["activations"] += steps * BF16 * shape.hidden * (3 * row.sharded_tokens + gathered)
        of_each = BF16 + (0 if megatron.mtp_detach_heads else FP32 / wider)
        train["activations"] += shape.vocabulary * shape.hidden / row.tp * of_each if parallel.pp > 1 else 0.0
    return Work(
        states,
        persistent,
        forward={"activations": 0.0, "logits or one layer": wider * forward},
        train={"activations": wider * train["activations"], "logits or one layer": wider * train["logits or backward"]},
    )


def other_model_memory(config: RunConfig, model: PlanModel, *, imbalance: float = IMBALANCE) -> dict[ModelName, Work]:
    """Peak memory of each model other than the policy, for its neediest stage: a rank may have any stage of it."""
    return {name: _neediest(config, name, other, imbalance) for name, other in model.beside.items()}


def memory_apart(config: RunConfig, model: PlanModel) -> dict[ModelName, Parts]:
    """Bytes of the fullest GPU of each model with nodes of its own, where it keeps its weights, as it works."""
    found: dict[ModelName, Parts] = {}
    for name, other in model.apart.items():
        work = _neediest(config, name, other, IMBALANCE)
        parts = {"weights": work.states.weights, "buffers": work.persistent, "outside torch": POLICY_CONTEXT}
        found[name] = _with_slack(parts | work.forward)
    return found


def _neediest(config: RunConfig, name: ModelName, model: PlanModel, imbalance: float) -> Work:
    stages = range(config.model(name).megatron_cfg.pipeline_model_parallel_size)
    works = [work_of(config, model, stage, name, imbalance=imbalance) for stage in stages]
    return max(works, key=_needed_if_frozen if is_frozen(name) else _needed_in_training)


def _with_slack(parts: Parts) -> Parts:
    """Parts with unusable cached blocks, which are as large as the transient ones."""
    return {**parts, "slack": SLACK * sum(size for name, size in parts.items() if name.startswith(_PASSING))}


def _needed_if_frozen(work: Work) -> float:
    return work.states.weights + work.persistent + sum(work.forward.values())


def _needed_in_training(work: Work) -> float:
    return work.states.allocated + work.persistent + max(sum(work.forward.values()), sum(work.train.values()))


def rank_memory(
    config: RunConfig, model: PlanModel, pp_rank: int, engine: EngineMemory | None, *, imbalance: float = IMBALANCE
) -> RankMemory:
    """Bytes that a rank of a pipeline stage allocates in each phase."""
    mine = work_of(config, model, pp_rank, imbalance=imbalance)
    beside = other_model_memory(config, model, imbalance=imbalance)
    states, works = mine.states, {"policy": mine, **beside}
    sleeping = ENGINE_CONTEXT + engine.graphs if engine and config.policy.generation.colocated.enabled else 0.0
    stays = not config.frees_training_memory
    phases: dict[Phase, Parts] = {}
    for phase, residency in PHASES.items():
        workers = [name for name in works if role_of(name) == WORKERS.get(phase, "policy")]
        if not workers or (not config.has_engines and phase in ("generate", "refit")):
            continue
        # Teachers compute one after another.
        worker = max(workers, key=lambda name: _needed_if_frozen(works[name]))
        parts = {"weights": states.weights, "buffers": mine.persistent, "outside torch": POLICY_CONTEXT + sleeping}
        if residency.gradients == "device" or stays:
            parts["gradients"] = states.gradients
        if residency.optimizer == "device" or stays:
            parts["optimizer"] = states.optimizer
        for name, work in beside.items():
            place = residency.of(name)
            # Teachers load one after another before the policy, and each has left the GPU by then.
            if phase == "load" or place.weights != "device" or (role_of(name) == "teacher" and name != worker):
                continue
            parts[f"weights of the {name}"] = work.states.weights
            parts["buffers"] += work.persistent
            if place.gradients == "device":
                parts[f"gradients of the {name}"] = work.states.gradients
            if place.optimizer == "device":
                parts[f"optimizer of the {name}"] = work.states.optimizer
        if residency.activations == "device":
            parts |= works[worker].train if phase in ("train", "train_value") else works[worker].forward
        if engine and sleeping and residency.engine_weights == "device":
            parts["engine weights"] = engine.weights
        if engine and sleeping and residency.kv_cache == "device":
            parts |= {"engine activations": engine.activations + engine.unmeasured, "KV cache": max(0.0, engine.cache)}
        if engine and sleeping and engine.staging:
            parts["staged weights"] = engine.staging
        if phase == "refit":
            # Rounds arrive in one buffer, and are packed in another that holds one round.
            parts["exchange buffer"] = (1 + 1 / NUM_BUFFERS) * config.policy.refit_buffer_size_gb * 1e9
        phases[phase] = _with_slack(parts)
    return RankMemory(pp_rank, phases)


def all_ranks(
    config: RunConfig, model: PlanModel, gpu: Gpu, *, imbalance: float = IMBALANCE
) -> tuple[list[RankMemory], EngineMemory | None]:
    """A rank per pipeline stage with the engine on its GPU. Of equal inner ones, the first, with most microbatches."""
    engine = engine_memory(config, model, gpu) if config.has_engines else None
    parallel, layers = config.policy.megatron_cfg.parallel, model.shape.layers
    stages: dict[object, int] = {}
    for stage in range(parallel.pp):
        mine = sorted(layers[i] for chunk in range(parallel.vpp) for i in parallel.layers_of(stage, len(layers), chunk))
        stages.setdefault((stage in (0, parallel.pp - 1) and stage, *mine), stage)
    return [rank_memory(config, model, stage, engine, imbalance=imbalance) for stage in stages.values()], engine


def stage_states(config: RunConfig, model: PlanModel, pp_rank: int, name: ModelName = "policy") -> States:
    """States of a rank of a pipeline stage of the model of this name."""
    rules = state_rules(config, name)
    rules = replace(rules, is_trained=False) if is_frozen(name) else rules
    what = {"trains_mtp": config.mtp_steps_of(name) > 0, "has_head": _has_head(config, name)}
    megatron = config.model(name).megatron_cfg
    states = state_bytes(model.elements.stage(megatron.parallel, pp_rank, **what), rules)
    if name != "policy" or not megatron.peft.enabled or not megatron.peft.merge:
        return states
    adapted = model.adapted_elements(tuple(megatron.peft.target_modules), tuple(megatron.peft.exclude_modules))
    return replace(states, base=sum(adapted.stage(megatron.parallel, pp_rank)[:2]) * rules.weight_bytes)


def _has_head(config: RunConfig, name: ModelName) -> bool:
    return config.algorithm == "rm" or name == "critic"


def least_parts(parts: Parts) -> Parts:
    """Parts of a phase that a run surely needs: those that torch allocates, as far as published runs bound them.

    Slack and the memory outside of torch are constants that nobody has measured for mrl.
    """
    return {name: size / EXCESS for name, size in parts.items() if name not in ("slack", "outside torch")}


def least_peak(rank: RankMemory) -> float:
    """The least need of a rank's worst phase; see `least_parts`."""
    return max(sum(least_parts(parts).values()) for parts in rank.phases.values())


PAGE_CACHE = "model files in the page cache"
ROLLOUTS = "rollouts in Ray's object store"
ROUNDING = "rounding of pinned memory"


def host_memory(config: RunConfig, model: PlanModel, states: States) -> Parts:
    """Host memory of the first node: tensors off its GPUs, a checkpoint's copy, page cache of model files, rollouts.

    Tensors moved between phases share one pinned block (`mrl.policy.host_block`), which torch does not round up, unlike
    the host tensors of Megatron's optimizer.
    """
    ranks = config.cluster.slots_per_node
    away = states.optimizer + states.host_optimizer if config.frees_training_memory else states.host_optimizer
    rounding = states.pinned * (PINNED_ROUNDING - 1)
    files = {each.folder: each.num_parameters for each in model.by_name.values()}
    parts = {"optimizer off the GPUs": away * ranks, PAGE_CACHE: float(sum(files.values()) * BF16)}
    if rounding:
        parts[ROUNDING] = rounding * ranks
    for name, work in other_model_memory(config, model).items():
        parts[f"weights of the {name}"] = work.states.weights * ranks
        if role_of(name) != "teacher":
            parts[f"optimizer of the {name}"] = (work.states.optimizer + work.states.host_optimizer) * ranks
    if config.keeps_reference:
        parts["weights of the reference"] = states.reference * ranks
    if states.base:
        parts["base of adapted weights"] = states.base * ranks
    saved = {
        name: size
        for name, size in saved_bytes(config, model).items()
        if config.model(name).megatron_cfg.checkpoint.async_save
    }
    if config.checkpointing.enabled and saved:
        parts["checkpoint being written"] = sum(saved.values()) / config.num_policy_ranks * ranks
    if config.has_engines:
        parts[ROLLOUTS] = rollout_bytes(config)
    return parts


def saved_bytes(config: RunConfig, model: PlanModel) -> dict[ModelName, int]:
    """The size of one checkpoint, by model."""
    return checkpoint_bytes(config, {name: model.by_name[name].num_parameters for name in config.trained_models})


def disk_bytes(config: RunConfig, model: PlanModel) -> tuple[float, int | None]:
    """Size of all kept checkpoints and one being written, and their number; None if unbounded: one counts."""
    if not config.checkpointing.enabled:
        return 0.0, 0
    kept = num_kept_at_most(config)
    return float(sum(saved_bytes(config, model).values()) * ((kept or 1) + 1)), kept


def cache_bytes(model: PlanModel) -> float:
    """The size of the run's models in the conversion cache, which knows each by its files and config.json."""
    entries = {
        (each.folder, json.dumps(each.hf_config, sort_keys=True)): each.num_parameters
        for each in model.by_name.values()
    }
    return float(sum(entries.values()) * BF16)


def rollout_bytes(config: RunConfig) -> float:
    """The size of a step's rollouts in transit: token id, logprob and mask of each token, teachers' scores."""
    tokens = (
        config.rollouts.num_rollouts_per_step * config.policy.max_total_sequence_length if config.has_engines else 0
    )
    return float(math.ceil(tokens) * 16 + config.frozen_output_bytes)
