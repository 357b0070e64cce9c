# SPDX-License-Identifier: Apache-2.0
"""Functions that tests of step, settling and checkpoints run on the ranks: a whole `PolicyRank`, on random rollouts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrl.config.load import load_config
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, pack_row, padded_length
from mrl.data.planning import RowPlan, SequenceCost, batch_in_order, pack, repack
from mrl.phases import ModelName
from mrl.types import Rollout, RolloutRequest, SamplingParams, TokenSample, TrainSequence
from tests.rollouts import pulled
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import Rank
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from megatron.core.optimizer import DistributedOptimizer

    from mrl.policy.policy import PolicyRank

PAD_TOKEN_ID = 256
NUM_SEQUENCES = 16
PLACES = {1: 1, 2: 2, 6: 1, 10: 1}
"""Sequences that belong to the rollout of those before them, as those of sub-agents; the others are rollouts of one
sequence.
"""
ROW_TOKENS = 64
LOGPROB_ROW_TOKENS = 40

# The tiny model has seven layers.
UNEVEN = ("pp2 dp2 ep2", "tp2 sp pp2 cp2 ep4")
BF16 = ("policy.precision=bfloat16", "policy.megatron_cfg.optimizer.bf16=true")


def world_size(layout: str) -> int:
    return sizes(layout)[0]


def sizes_of(layout: str) -> dict[str, object]:
    """Settings of a layout, as the tiny model's layers allow."""
    return sizes(layout)[1] | (dict(num_layers_in_first_pipeline_stage=4) if layout in UNEVEN else {})


def run_config(folder: Path, layout: str, *overrides: str) -> RunConfig:
    """The laptop config on the model in `folder`, at a layout with an optimizer whose steps do not amplify rounding."""
    given = dict(tensor_model_parallel_size=1, expert_model_parallel_size=1, sequence_parallel=False) | sizes_of(layout)
    megatron = [f"policy.megatron_cfg.{key}={value}" for key, value in given.items()]
    optimizer = [
        f"policy.megatron_cfg.optimizer.{item}"
        for item in ("lr=1e-3", "min_lr=1e-3", "adam_eps=1e-3", "weight_decay=0.01")
    ]
    # A warmup begins with a step of learning rate 0.
    optimizer.append("policy.megatron_cfg.scheduler.lr_warmup_iters=0")
    return load_config("grpo_tiny.yaml", [f"policy.model_name={folder}", *megatron, *optimizer, *overrides])


def rollouts() -> list[tuple[int, Rollout, float, bool]]:
    """Index, random rollout, advantage and validity; one in seven is not valid. Generator logprobs are arbitrary."""
    rng = np.random.default_rng(0)
    result = []
    for index in range(NUM_SEQUENCES):
        prompt = tuple(int(token) for token in rng.integers(0, 256, int(rng.integers(3, 12))))
        length = int(rng.integers(1, 10))
        request = RolloutRequest(f"p{index}", 0, 0, 1, prompt, SamplingParams(1.0, 1.0, None, 16, (258,)))
        logprobs = rng.normal(-5.0, 0.3, length).astype(np.float32)
        rollout = Rollout(request, 1, rng.integers(0, 256, length).astype(np.int32), logprobs, "stop")
        result.append((index, rollout, float(rng.normal()), index % 7 != 3))
    return result


def plan_of(algorithm: str, dp_size: int, sequence_multiple: int = 1) -> tuple[RowPlan, RowPlan]:
    """Rows of the rollouts in training, and smaller ones of the logprob passes."""
    lengths = [
        padded_length(len(rollout.request.token_ids) + len(rollout.token_ids), sequence_multiple)
        for _, rollout, _, _ in rollouts()
    ]
    plan = pack(lengths, algorithm=algorithm, row_tokens=ROW_TOKENS, dp_size=dp_size, cost=SequenceCost(1.0, 0.01))
    return plan, repack(plan, lengths, algorithm=algorithm, row_tokens=LOGPROB_ROW_TOKENS)


def pack_rows(
    config: PolicyConfig, plan: Iterable[Sequence[int]], made: Mapping[int, TrainSequence] | None = None
) -> list[PackedRow]:
    """The planned rows of one rank, padded as its layout asks; of the random rollouts where no sequences are given."""
    multiples = dict(divisible_by=config.row_multiple, sequence_multiple=config.sequence_multiple)
    if made is None:
        made = {
            index: pulled(rollout, advantage, is_valid, place=PLACES.get(index, 0))
            for index, rollout, advantage, is_valid in rollouts()
        }
    return [pack_row({index: made[index] for index in row}, **multiples, pad_token_id=PAD_TOKEN_ID) for row in plan]


def packed_rows(config: PolicyConfig, dp_rank: int, dp_size: int) -> list[PackedRow]:
    """The rows of one data-parallel rank, as `set_batch` packs them."""
    return pack_rows(config, plan_of("balanced", dp_size, config.sequence_multiple)[0][dp_rank])


@contextmanager
def open_models(rank: Rank, configs: Sequence[tuple[ModelName, RunConfig]]) -> Iterator[list[PolicyRank]]:
    """The models of these configs in this process, built in this order."""
    from mrl.policy.parallel import Meeting
    from mrl.policy.policy import PolicyRank

    torch.set_num_threads(1)
    models: list[PolicyRank] = []
    try:
        for name, config in configs:
            models.append(
                PolicyRank(
                    config,
                    rank=rank.rank,
                    world_size=rank.world_size,
                    meeting=Meeting(rank.master_address, rank.master_port),
                    timeout_s=HANG_S,
                    model=name,
                )
            )
        for model in models:
            model.load_hf(model._section.model_name)
        yield models
    finally:
        for model in models:
            model.close()


@contextmanager
def open_policy(rank: Rank, config: RunConfig) -> Iterator[PolicyRank]:
    """The rank's policy with its model folder's weights and its rows as the batch."""
    with open_models(rank, [("policy", config)]) as (policy,):
        yield policy


def set_batch(policy: PolicyRank, algorithm: str | None = None) -> None:
    """Sets rollouts as batch; a named algorithm has other rows in logprob passes, "" = each sequence in its own row."""
    from megatron.core import parallel_state

    config, dp_size = policy._section, parallel_state.get_data_parallel_world_size()
    plans = plan_of(algorithm or "balanced", dp_size, config.sequence_multiple)[: 2 if algorithm else 1]
    if algorithm == "":
        plans = (batch_in_order(NUM_SEQUENCES, sequences_per_row=1, dp_size=dp_size),)
    policy.set_batch(*(pack_rows(config, plan[policy.dp_rank]) for plan in plans))


def kept_by_rows(policy: PolicyRank, name: str, batch_index: int = 0) -> list[np.ndarray]:
    """The values that a pass has left in the rows of a batch; none off the last pipeline stage."""
    values = [getattr(row, name) for row in policy._batches[batch_index].rows]
    return [value.numpy() for value in values if value is not None]


def set_old_logprobs(policy: PolicyRank) -> None:
    """Gives the rows made-up old logprobs."""
    (batch,) = policy._batches
    batch.has_old_logprobs = True
    for row in batch.rows:
        row.old_logprobs_T = torch.from_numpy(old_logprobs(row.labels_T.numpy(), row.generator_logprobs_T.numpy()))


def train(policy: PolicyRank, num_steps: int) -> list[dict[str, float]]:
    """Metrics of on-policy steps; with a reference where the loss asks for one."""
    metrics = []
    for _ in range(num_steps):
        policy.enter("logprob")
        set_batch(policy)
        policy.compute_old_logprobs()
        if policy._config.loss_fn.reference_policy_kl_penalty > 0:
            policy.compute_reference_logprobs()
        policy.enter("train")
        metrics.append(policy.train_step())
    return metrics


def old_logprobs(labels: np.ndarray, generator_logprobs: np.ndarray) -> np.ndarray:
    """Made-up old logprobs, far enough from any model's that ratios are clipped on both sides."""
    return generator_logprobs + np.where(labels % 2 == 0, 0.3, -0.2).astype(np.float32)


def raw_checksums(policy: PolicyRank) -> dict[str, int]:
    """crc32 of every live tensor as it is now, whether settled or not."""
    return {
        str(slot): zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy().data)
        for slot, tensor in policy._tensors.items()
    }


# What follows runs on a rank.


def off_policy_steps(
    rank: Rank, config: RunConfig, num_steps: int
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Metrics of steps with made-up old logprobs and a reference, and canonical weights at the end. For one rank."""
    with open_policy(rank, config) as policy:
        metrics = []
        for _ in range(num_steps):
            set_batch(policy)
            policy.compute_old_logprobs()
            policy.compute_reference_logprobs()
            set_old_logprobs(policy)
            policy.enter("train")
            metrics.append(policy.train_step())
        return metrics, canonical_weights(policy)


def canonical_weights(policy: PolicyRank) -> dict[str, np.ndarray]:
    """Whole canonical tensors, of a policy of one rank."""
    from conversion.families.registry import family
    from conversion.tensors import box_view

    weights = {
        name: np.full(shape, np.nan, np.float32)
        for name, shape in family(policy._hf_config).canonical(policy._hf_config).items()
    }
    for slot, tensor in policy.settled_weights().items():
        for piece in policy._layout[slot].pieces:
            target = weights[piece.name][tuple(slice(start, stop) for start, stop in piece.box)]
            target[...] = box_view(tensor.detach(), piece.local).float().numpy().reshape(target.shape)
    return weights


def routing_of_step(rank: Rank, config: RunConfig) -> tuple[dict[str, float], dict[str, np.ndarray], set[str]]:
    """Routing of a step with a reference: metrics, this rank's biases before and after, slots with optimizer state.

    Biases are [2, experts], by canonical name.
    """
    with open_policy(rank, config) as policy:
        slots = {slot: tensor for slot, tensor in policy._tensors.items() if slot.name.endswith("expert_bias")}
        biases = {policy._layout[slot].pieces[0].name: tensor for slot, tensor in slots.items()}
        before = {name: tensor.numpy().copy() for name, tensor in biases.items()}
        set_batch(policy)
        policy.compute_old_logprobs()
        policy.compute_reference_logprobs()
        policy.enter("train")
        metrics = policy.train_step()
        policy.settle()
        moved = {name: np.stack([before[name], tensor.numpy()]) for name, tensor in biases.items()}
        return metrics, moved, {name for name, _, _ in main_shards(policy)}


def optimizers(policy: PolicyRank) -> list[DistributedOptimizer]:
    """The optimizers of dense layers and of experts."""
    from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer

    assert isinstance(policy._state.optimizer, ChainedOptimizer)
    return [
        optimizer
        for optimizer in policy._state.optimizer.chained_optimizers
        if isinstance(optimizer, DistributedOptimizer)
    ]


def optimizer_checksum(policy: PolicyRank) -> int:
    states = [state for optimizer in optimizers(policy) for state in optimizer.optimizer.state.values()]
    return zlib.crc32(b"".join(state[key].numpy().tobytes() for state in states for key in ("exp_avg", "exp_avg_sq")))


def message_of(function: Callable[[], object]) -> str:
    """Message of the RuntimeError that `function` raises; empty if it raises none."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def metrics_of_steps(rank: Rank, config: RunConfig, num_steps: int) -> list[dict[str, float]]:
    with open_policy(rank, config) as policy:
        return train(policy, num_steps)


def sampled_tokens(rank: Rank, config: RunConfig, wanted: Sequence[int]) -> list[dict[int, TokenSample]]:
    """Samples that this rank returns in a first and a second call after a step."""
    with open_policy(rank, config) as policy:
        train(policy, 1)
        return [policy.token_samples(wanted) for _ in range(2)]


def widths_of_output(rank: Rank, config: RunConfig) -> set[int]:
    """Last sizes of what the output layer returns in a logprob pass and train step; empty on all but the last stage."""
    from megatron.core.utils import unwrap_model

    widths: set[int] = set()
    with open_policy(rank, config) as policy:
        for chunk in policy._chunks:
            if (layer := unwrap_model(chunk).output_layer) is not None:
                layer.register_forward_hook(lambda _, __, output: widths.add(output[0].shape[-1]))
        train(policy, 1)
    return widths


def step_on_rows(rank: Rank, config: RunConfig, num_rows: int) -> tuple[list[np.ndarray], dict[str, float]]:
    """Logprobs of the first rows of the batch, and metrics of a step on them."""
    with open_policy(rank, config) as policy:
        set_batch(policy)
        rows = policy._batches[0].rows[:num_rows]
        logprobs = policy.logprobs_of_rows(rows)
        policy.set_batch(rows)
        policy.compute_old_logprobs()
        policy.enter("train")
        return logprobs, policy.train_step()


def two_updates_of_a_step(
    rank: Rank, config: RunConfig
) -> tuple[list[np.ndarray], list[np.ndarray], list[dict[str, float]], list[dict[str, float]]]:
    """Logprobs of the second update's row before the first, those kept as old, metrics of both and of a next step."""
    with open_policy(rank, config) as policy:
        set_batch(policy)
        first, second = policy._batches[0].rows[:1], policy._batches[0].rows[1:2]
        before = policy.logprobs_of_rows(second)
        policy.set_batch(first)
        policy.set_batch(second, is_further=True)
        policy.compute_old_logprobs()
        kept = kept_by_rows(policy, "old_logprobs_T", 1)
        policy.enter("train")
        updates = [policy.train_step(0), policy.train_step(1)]
        for phase in ("refit", "generate", "train"):
            policy.enter(phase)
        assert "there is no batch" in message_of(policy.train_step)
        return before, kept, updates, train(policy, 1)


def first_step_of_plans(rank: Rank, config: RunConfig, algorithms: Sequence[str]) -> dict[str, dict[str, float]]:
    """Metrics of a step on the starting weights, with the rollouts packed by each algorithm in turn."""
    metrics = {}
    with open_policy(rank, config) as policy:
        for algorithm in algorithms:
            policy.load_hf(config.policy.model_name)
            set_batch(policy, algorithm)
            policy.compute_old_logprobs()
            policy.enter("train")
            metrics[algorithm] = policy.train_step()
    return metrics


def settle_after_steps(
    rank: Rank, config: RunConfig
) -> tuple[dict[str, int], dict[str, int], dict[str, np.ndarray], list]:
    """Checksums after a step and after settling; settled weights (flat, fp32); this rank's main parameter shards."""
    with open_policy(rank, config) as policy:
        train(policy, 2)
        raw = raw_checksums(policy)
        weights = {
            str(slot): tensor.detach().float().flatten().numpy().copy()
            for slot, tensor in policy.settled_weights().items()
        }
        return raw, raw_checksums(policy), weights, main_shards(policy)


def main_shards(policy: PolicyRank) -> list[tuple[str, int, np.ndarray]]:
    """(slot, first element, values) of every fp32 main parameter shard that this rank's optimizer updates."""
    names = {id(tensor): str(slot) for slot, tensor in policy._tensors.items()}
    shards = []
    for optimizer in optimizers(policy):
        model_groups = optimizer.model_float16_groups + optimizer.model_fp32_groups
        main_groups = optimizer.shard_fp32_from_float16_groups + optimizer.shard_fp32_groups
        for params, mains in zip(model_groups, main_groups, strict=True):
            for param, main in zip(params, mains, strict=True):
                start = optimizer._get_model_param_range_map(param)["param"].start
                shards.append((names[id(param)], start, main.detach().numpy().copy()))
    return shards


def settle_with_flipped_bytes(rank: Rank, config: RunConfig, slots: Sequence[str]) -> list[str]:
    """The settle's message after a byte of a slot was flipped on the last rank, for each slot; all are flipped back."""
    with open_policy(rank, config) as policy:
        train(policy, 1)
        policy.settle()
        messages = []
        for name in slots:
            values = [
                tensor.detach().view(-1).view(torch.uint8)
                for slot, tensor in policy._tensors.items()
                if str(slot) == name
            ]
            for _ in range(2):
                if rank.rank == rank.world_size - 1:
                    values[0][5] ^= True
                messages.append(message_of(policy.settle))
            assert messages.pop() == ""
        return messages


def settle_with_unknown_buffer(rank: Rank, config: RunConfig) -> str:
    """Message of a settle when the live model has a persistent buffer that no conversion table knows."""
    with open_policy(rank, config) as policy:
        policy._chunks[0].module.register_buffer("scale", torch.ones(3))
        return message_of(policy.settle)


def load_both_ways(rank: Rank, config: RunConfig, cached: Path) -> tuple[list[str], int]:
    """Weights, reference and main parameters that differ between model folder and cached checkpoint; their number."""
    with open_policy(rank, config) as policy:
        from_hf = loaded_bits(policy)
        with torch.no_grad():
            # Nothing of the first way may remain, the padding of the vocabulary neither.
            for tensor in [*policy.settled_weights().values(), *(policy._reference or {}).values()]:
                tensor.fill_(7)
        policy.load_mcore(cached)
        from_cache = loaded_bits(policy)
        assert from_hf.keys() == from_cache.keys()
        return [name for name in from_hf if from_hf[name] != from_cache[name]], len(from_hf)


def loaded_bits(policy: PolicyRank) -> dict[str, bytes]:
    """All that loading sets, as bytes."""
    tensors = {f"weight {slot}": tensor for slot, tensor in policy.settled_weights().items()}
    tensors |= {f"reference {slot}": tensor for slot, tensor in (policy._reference or {}).items()}
    bits = {name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    return bits | {f"main {name} {start}": values.tobytes() for name, start, values in main_shards(policy)}


def class_origins(rank: Rank, config: RunConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Module of the class of every part of the live policy and of its schedule, and what `cpu.install` replaced."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mrl.policy import cpu, step

    with open_policy(rank, config) as policy:
        modules = [module for chunk in policy._chunks for module in chunk.modules()]
        parts = [*modules, policy._state.scheduler, policy._state.optimizer, *optimizers(policy)]
        parts += [part.optimizer for part in optimizers(policy)]
        origins = {type(part).__name__: type(part).__module__ for part in parts}
        assert step.get_forward_backward_func is get_forward_backward_func
        schedule = get_forward_backward_func()
        return origins | {schedule.__name__: schedule.__module__}, dict(cpu.REPLACED)


def refit_after_steps(rank: Rank, config: RunConfig) -> tuple[dict[str, np.ndarray], list[tuple[str, int, np.ndarray]]]:
    """The first refit after steps, into tensors of an engine with one worker, on the GPU of rank 0.

    Returns these tensors on rank 0, float32 by slot, and this rank's shards of the main parameters.
    """
    import torch.distributed as dist

    from conversion.families.common import VllmParallel
    from conversion.families.registry import family
    from conversion.tensors import torch_dtype
    from mrl.refit.group import GroupAddress
    from mrl.refit.inputs import RankPlace, RefitInputs
    from mrl.refit.pull import Puller

    with open_policy(rank, config) as policy:
        hf_config, vllm_cfg = policy._hf_config, config.policy.generation.vllm_cfg
        target = family(hf_config).vllm_layout(hf_config, VllmParallel(), 0, vllm_cfg.precision)
        places: list[RankPlace] = [policy.layout_arguments()] * rank.world_size
        dist.all_gather_object(places, policy.layout_arguments())
        # On nodes of their own, ranks send each other what they would read in the arenas of one node.
        nodes = {index: index for index in range(rank.world_size)}
        inputs = RefitInputs(
            hf_config,
            tuple(places),
            VllmParallel(),
            vllm_cfg.precision,
            {0: (0, ())},
            {0: 0},
            nodes,
            buffer_bytes=100_000,
        )
        schedule = inputs.schedule()
        address = GroupAddress(rank.master_address, rank.master_port, "exchange", tuple(range(rank.world_size)))
        handles = policy.prepare_refit(inputs, address)
        live = {
            slot: torch.full(content.shape, 7, dtype=torch_dtype(content.dtype)) for slot, content in target.items()
        }
        is_host = rank.rank == 0
        puller = Puller(lambda: live, schedule, 0, handles) if is_host else None
        train(policy, 2)
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(puller.run, 1, timeout_s=HANG_S) if puller else None
            policy.refit(1, [0], 60.0)
        if puller and pulling:
            pulling.result()
            puller.finish()
        return ({str(slot): tensor.float().numpy() for slot, tensor in live.items()} if is_host else {}), main_shards(
            policy
        )
