# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step by phase, as a low and high figure: operations and bytes against the GPU's peaks at a stated share.

The shares come from published runs (docs/plan.md), not from mrl, which is not measured on GPUs yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config.model import ModelSizes
from mrl.config.schema.run import RunConfig
from mrl.data.planning import SequenceCost
from mrl.phases import REFERENCE, role_of
from mrl.plan.activations import BF16
from mrl.plan.engine import token_bytes
from mrl.plan.facts import IMBALANCE, PlanModel, computed_tokens, num_microbatches
from mrl.plan.hardware import Gpu
from mrl.plan.memory import EngineMemory
from mrl.plan.traffic import RefitTraffic


@dataclass(frozen=True)
class TimeRange:
    """A low and a high figure."""

    low: float
    high: float

    def plus(self, other: TimeRange) -> TimeRange:
        return TimeRange(self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> TimeRange:
        return TimeRange(self.low * factor, self.high * factor)


# Shares of a GPU's peak (high, low): of products in a train step with experts and with dense layers, of memory
# bandwidth in decoding.
EXPERT_PRODUCTS, DENSE_PRODUCTS, DECODING = (0.36, 0.226), (0.48, 0.30), (0.42, 0.27)
# Of links and memory in a refit, high as measured and low as half of it: 370 of 450 GB/s over NVLink
# (github.com/NVIDIA/nccl/issues/1374), 48.5 of 50 GB/s over InfiniBand (github.com/NVIDIA/nccl-tests/issues/267). That
# of memory is assumed.
NVLINK, NETWORK, MEMORY = (0.82, 0.41), (0.97, 0.48), (0.80, 0.40)
# Seconds of a layer in a decode step, added to those of its bytes: kernel launches, and two exchanges between workers.
LAYER_LATENCY = TimeRange(65e-6, 103e-6)
# Seconds of an exchange over the network, whatever its size: microseconds for each hop of a ring, and NCCL's own.
# Assumed.
NETWORK_LATENCY = TimeRange(20e-6, 100e-6)
# Seconds of a switch between phases, rewards and data together.
SWITCHES = TimeRange(12.0, 19.0)
# Seconds of a refit on the host: a kernel's launch from Python, a wait for a stream or for another process, and a call
# of an actor by the driver (measured on CPU hosts; the high figure is for a slower host).
LAUNCH, WAIT, CALL = TimeRange(15e-6, 50e-6), TimeRange(50e-6, 300e-6), TimeRange(0.4e-3, 0.8e-3)
# Kernels and waits of a round, in a rank's exchange and in a worker's pull and verification; then kernels of a message.
EXCHANGE_LAUNCHES, EXCHANGE_WAITS, PULL_LAUNCHES, PULL_WAITS = 1, 2, 3, 3
MESSAGE_LAUNCHES = 2
TAIL_PARTS = 8
"""Batches for which the tail of a step's sampling is priced."""
BACKWARD = 2
"""Operations of a backward pass, in forward passes."""


def seconds(amount: float, rate: float, shares: tuple[float, float]) -> TimeRange:
    """Time of an amount at two shares of a rate."""
    return TimeRange(amount / (rate * shares[0]), amount / (rate * shares[1]))


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the phases of a step, and what bounds the longest."""

    phases: dict[str, TimeRange]
    mean_tokens: float
    """Tokens of a rollout with its prompt that the times are for."""
    concurrency: float
    """Rollouts that an engine samples at once, in each of its groups."""

    @property
    def total(self) -> TimeRange:
        total = TimeRange(0.0, 0.0)
        for phase in self.phases.values():
            total = total.plus(phase)
        return total

    @property
    def bottleneck(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase].high)


def forward_operations(cost: SequenceCost, tokens: float, length: float) -> float:
    """Operations of a forward pass over `tokens` tokens in sequences of a mean length."""
    return tokens * (cost.per_token + cost.per_token_squared * length + cost.scan_per_token)


def train_seconds(
    shape: ModelSizes,
    cost: SequenceCost,
    gpu: Gpu,
    *,
    tokens: float,
    length: float,
    gpus: int,
    passes: float,
    imbalance: float = IMBALANCE,
) -> TimeRange:
    """Time of so many forward passes' operations on the GPUs of a policy; all wait for the busiest rank's experts."""
    shares = EXPERT_PRODUCTS if shape.experts else DENSE_PRODUCTS
    of_experts = (
        2
        * shape.topk
        * "".join(shape.layers).count("E")
        * (shape.fc1_factor + 1)
        * (shape.latent or shape.hidden)
        * shape.expert_ffn
    )
    operations = forward_operations(cost, tokens, length) + (imbalance - 1) * tokens * of_experts
    return seconds(passes * operations / gpus, gpu.peak, shares)


def decode_seconds(
    shape: ModelSizes,
    gpu: Gpu,
    engine: EngineMemory,
    *,
    tp: int,
    pp: int = 1,
    num_groups: int = 1,
    rollouts: float,
    at_once: float,
    mean: float,
    longest: float,
    num_nodes: int = 1,
) -> TimeRange:
    """Time of an engine to sample its rollouts: full until the last start, then the tail, in which ever fewer go on.

    Of several groups each has `rollouts`, all reach each other's experts, and each pass takes in the tokens of all. In
    the tail the batch shrinks exponentially to the longest rollout. Each part is priced by its own batch and lengths.
    Of `pp` stages all work at best, each on its part of the batch; at worst they wait for each other with the whole, as
    vLLM schedules what has room in one step.
    """
    letters = "".join(shape.layers)
    experts = (
        letters.count("E")
        * shape.experts
        * (shape.fc1_factor + 1)
        * (shape.latent or shape.hidden)
        * shape.expert_ffn
        * BF16
    )
    experts /= tp * num_groups

    def stage(batch: float, length: float) -> TimeRange:
        idle = (1 - shape.topk / shape.experts) ** (num_groups * batch) if shape.experts else 0.0
        keys = letters.count("*") / pp * token_bytes(shape, tp) * length
        per_rollout = keys + 2 * engine.layout.state_groups * engine.layout.block_bytes
        return seconds(engine.weights - idle * experts / pp + batch * per_rollout, gpu.bandwidth, DECODING)

    def step(batch: float, length: float) -> TimeRange:
        found = (
            TimeRange(stage(batch / pp, length).low, stage(batch, length).high)
            .times(pp)
            .plus(LAYER_LATENCY.times(len(shape.layers)))
        )
        if num_nodes > 1:
            # Each layer's outputs are summed twice: every GPU gets nearly twice what it has. Groups within nodes gather
            # tokens for experts.
            sums, rows, width = 2 * len(shape.layers), 2 * batch, shape.hidden
            if num_groups >= num_nodes:
                sums, rows, width = 2 * letters.count("E"), num_groups * batch, shape.latent or shape.hidden
            found = found.plus(seconds(sums * rows * width * BF16, gpu.network, NETWORK)).plus(
                NETWORK_LATENCY.times(sums)
            )
        return found

    falling = (at_once - 1) / math.log(at_once) if at_once > 1 else 1.0
    tail = min(longest, at_once * (longest - mean) / (at_once - falling)) if at_once > 1 else 0.0
    full = max(0.0, (rollouts * mean - falling * tail) / at_once)
    total = step(at_once, mean / 2).times(full)
    for part in range(TAIL_PARTS):
        share = (part + 0.5) / TAIL_PARTS
        total = total.plus(step(at_once ** (1 - share), (mean + share * longest) / 2).times(tail / TAIL_PARTS))
    return total


def exchange_seconds(config: RunConfig, model: PlanModel, gpu: Gpu, *, tokens: float) -> float:
    """Estimates a policy rank's exchanges in a train step, if products hide none: it ranks layouts, and is in no range.

    Tensor-parallel ranks exchange each layer's stream four times, experts get and give back their tokens in both
    passes. Context-parallel ranks pass keys and values around a ring, as fast as its slowest link, and Mamba layers
    exchange tokens for channels and back.
    """
    megatron, shape, letters = config.policy.megatron_cfg, model.shape, "".join(model.shape.layers)
    tp, cp, slots = megatron.tensor_model_parallel_size, megatron.context_parallel_size, config.cluster.slots_per_node
    experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    mine = BF16 * tokens / config.num_policy_ranks
    streams = 4 * mine * shape.hidden * len(shape.layers) * (tp - 1)
    routed = 4 * mine * shape.hidden * shape.topk * letters.count("E") * (1 - 1 / experts)
    keys = (1 + BACKWARD) * mine * 2 * shape.kv_heads * shape.head_dim * letters.count("*") * (cp - 1)
    channels = 2 * mine * (shape.mamba_projection + shape.mamba_inner) * letters.count("M") * (1 - 1 / cp)
    near, near_cp = min(1.0, slots / experts), min(1.0, slots / (tp * cp))
    inside = streams + routed * near + channels * near_cp + (keys if near_cp == 1 else 0)
    return (
        inside / gpu.link
        + (routed * (1 - near) + channels * (1 - near_cp) + (0 if near_cp == 1 else keys)) / gpu.network
    )


@dataclass(frozen=True)
class RefitTimes:
    """Seconds of a refit by who spends them."""

    parts: dict[str, TimeRange]
    """Times of the exchange: `network`, `node`, `packing`, `exchange host`; of the engine: `pull and verify`,
    `pull host`; and `driver`.
    """
    num_rounds: int

    @property
    def serial(self) -> TimeRange:
        """The time if each round is exchanged, pulled and verified before the next begins."""
        return self._sum(*self.parts)

    @property
    def overlapped(self) -> TimeRange:
        """Time if a round is exchanged while the last is pulled and verified: the longer and a round of the shorter."""
        sent = self._sum("network", "node", "packing", "exchange host")
        pulled = self._sum("pull and verify", "pull host")
        low, high = (
            max(a, b) + min(a, b) / self.num_rounds for a, b in ((sent.low, pulled.low), (sent.high, pulled.high))
        )
        return TimeRange(low, high).plus(self.parts["driver"])

    def _sum(self, *names: str) -> TimeRange:
        return TimeRange(sum(self.parts[name].low for name in names), sum(self.parts[name].high for name in names))


def refit_times(
    refit: RefitTraffic, gpu: Gpu, *, engine_weights: float, num_calls: int, network: tuple[float, float] = NETWORK
) -> RefitTimes:
    """Times of a refit for engine workers with `engine_weights` bytes each, by `num_calls` calls of the driver.

    A sender reads its messages twice, for packing and checksums, and writes them once; a worker reads arriving weights,
    writes them, and reads them again to compare. Waking memory and settling weights are not included.
    """
    rounds, sent = refit.num_rounds, refit.busiest["node"] + refit.busiest["network"]
    launches = MESSAGE_LAUNCHES * refit.most_messages + EXCHANGE_LAUNCHES * rounds
    parts = {
        "network": seconds(refit.busiest["network"], gpu.network, network),
        "node": seconds(refit.busiest["node"], gpu.link, NVLINK),
        "packing": seconds(3 * sent, gpu.bandwidth, MEMORY),
        "exchange host": LAUNCH.times(launches).plus(WAIT.times(EXCHANGE_WAITS * rounds)),
        "pull and verify": seconds(3 * engine_weights, gpu.bandwidth, MEMORY),
        "pull host": LAUNCH.times(PULL_LAUNCHES * rounds).plus(WAIT.times(PULL_WAITS * rounds)),
        "driver": CALL.times(num_calls),
    }
    return RefitTimes(parts, rounds)


def step_times(
    config: RunConfig,
    model: PlanModel,
    gpu: Gpu,
    engine: EngineMemory | None,
    refit: RefitTraffic | None,
    *,
    mean_tokens: float,
) -> StepTimes:
    """Times of a step whose rollouts have `mean_tokens` tokens with their prompts.

    Colocated, phases follow each other. Beside dedicated engines a step lasts as long as the longer of sampling and
    training; the shorter is left out.
    """
    shape, cost = model.shape, model.cost()
    megatron, gpus = config.policy.megatron_cfg, config.num_policy_ranks
    rollouts = config.rollouts.num_rollouts_per_step if config.has_engines else config.policy.train_global_batch_size
    tokens = rollouts * mean_tokens
    recomputed = megatron.activation_checkpointing and megatron.recompute_granularity == "full"
    passes = 1 + (1 if megatron.peft.enabled else BACKWARD) + recomputed
    computed = computed_tokens(config, mean_tokens)
    own = dict(tokens=tokens * computed.share, length=computed.length)
    rows = max(1, num_microbatches(config) // computed.rollouts_per_row)
    rows *= megatron.virtual_pipeline_model_parallel_size or 1
    bubble = 1 + (megatron.pipeline_model_parallel_size - 1) / rows
    learned = model.cost(config.mtp_steps)
    phases = {"train": train_seconds(shape, learned, gpu, **own, gpus=gpus, passes=passes).times(bubble)}
    if forward := config.needs_old_logprobs + config.keeps_reference:
        phases["logprobs"] = train_seconds(shape, cost, gpu, **own, gpus=gpus, passes=forward).times(bubble)
    for name, other in model.beside.items():
        # A teacher: one pass without gradients over its share of the rows. A trained model: two passes over all rows,
        # and a backward pass.
        parts = 1.0 / len(config.teachers) if role_of(name) == "teacher" else 2.0 + BACKWARD
        phases[name] = train_seconds(
            other.shape, other.cost(), gpu, tokens=tokens, length=mean_tokens, gpus=gpus, passes=parts
        )
    # Teachers with nodes of their own work at the same time; the reference beside the policy's logprobs.
    apart = {
        name: train_seconds(
            other.shape,
            other.cost(),
            gpu,
            tokens=tokens,
            length=mean_tokens,
            gpus=config.num_ranks_of(name),
            passes=1.0 if name == REFERENCE else 1.0 / len(config.teachers),
        )
        for name, other in model.apart.items()
    }
    if (reference := apart.pop(REFERENCE, None)) is not None:
        beside = phases.get("logprobs", reference)
        phases["logprobs"] = max(beside, reference, key=lambda time: time.high)
    if apart:
        phases["teachers apart"] = max(apart.values(), key=lambda time: time.high)
    if engine is None:
        return StepTimes(phases, mean_tokens, 0.0)
    vllm = config.policy.generation.vllm_cfg
    per_group = rollouts / config.num_engines / vllm.num_groups
    at_once = max(1.0, min(per_group, engine.limits.num_seqs, engine.concurrency(int(mean_tokens))))
    longest = max(mean_tokens, vllm.max_model_len)
    tp = vllm.tensor_parallel_size
    sizes = dict(rollouts=per_group, at_once=at_once, mean=mean_tokens, longest=longest)
    # Sums stay within a stage; what stages hand on is little. Groups exchange their tokens before and after the
    # experts.
    num_nodes = config.nodes_of_engine if tp * vllm.num_groups > config.cluster.slots_per_node else 1
    pp = vllm.pipeline_parallel_size
    generate = decode_seconds(
        shape, gpu, engine, tp=tp, pp=pp, num_groups=vllm.num_groups, **sizes, num_nodes=num_nodes
    )
    if refit is not None:
        # Of the driver: one of each policy rank, two of each engine (`mrl.cluster.refit`).
        num_calls = config.num_policy_ranks + 2 * config.num_engines
        phases["refit"] = refit_times(refit, gpu, engine_weights=engine.weights, num_calls=num_calls).overlapped
    if config.num_dedicated_slots:
        policy = StepTimes(phases, mean_tokens, at_once)
        return policy if policy.total.high > generate.high else StepTimes({"generate": generate}, mean_tokens, at_once)
    return StepTimes({"generate": generate} | phases | {"switches, rewards and data": SWITCHES}, mean_tokens, at_once)
