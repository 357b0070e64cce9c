# SPDX-License-Identifier: Apache-2.0
"""Ranks of grpo_nanov3.yaml at full size and beyond, one by one here: what Megatron makes of each, and what we plan.

Runs in the process of gpu_rows.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conversion.boxes import DTYPE_BYTES, Slot, volume
from conversion.families.common import HfConfig
from mrl.cluster.scheduling import engine_slots
from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.refit.inputs import RefitInputs
from tests.rehearsal.gpu_host import Rank, as_rank
from tests.sources import ROOT

if TYPE_CHECKING:
    from conversion.schedule import Holding, Schedule

MODEL = "nemotron3_nano_30b_a3b"
TP, EP = 2, 8
NODES = (32, 512)


def chosen(world: int) -> list[int]:
    """The first and the last rank of each of two pipeline stages, and one in the middle."""
    return [0, world // 2 - 1, world // 2, world - 1, world * 3 // 8 + 3]


def replicas(world: int) -> dict[str, list[int]]:
    """All ranks with rank 0's dense weights, and all with the last rank's experts: these share one optimizer state."""
    return {"dense": list(range(0, world // 2, TP)), "experts": list(range(world // 2 + EP - 1, world, EP))}


RANKS: dict[str, list[tuple[int, int]]] = {
    "installed": sorted(
        {
            *((nodes, rank) for nodes in NODES for rank in chosen(nodes * 8)),
            *((NODES[0], rank) for rank in replicas(NODES[0] * 8)["experts"]),
        }
    ),
    "newest": [(nodes, nodes * 8 - 1) for nodes in NODES],
    "dense": [(NODES[0], rank) for rank in replicas(NODES[0] * 8)["dense"]],
}
"""Nodes and rank by megatron-core: chosen ranks of both runs, of the smaller one all replicas of the last rank's
experts; on that of newer Pythons the last rank of each. `dense` are all replicas of the first rank's dense weights."""


@dataclass(frozen=True)
class Shard:
    """A trained weight, and which of its elements this rank's optimizer updates: [start, stop), or none."""

    num_elements: int
    is_expert: bool
    start: int
    stop: int


@dataclass(frozen=True)
class Row:
    """One rank of a run on so many nodes."""

    nodes: int
    rank: int
    coords: tuple[int, int, int, int]
    """tp, pp, ep, etp."""
    dense_replica: tuple[int, int]
    """Place and number of the ranks over which gradients of dense weights are summed."""
    expert_replica: tuple[int, int]
    shards: dict[str, Shard]
    main_elements: int
    """Elements of the parameters that its optimizer holds."""
    bucket_remainders: list[int]
    """Elements of each of DDP's buckets, modulo the number of its ranks."""
    weight_bytes: int
    arena_bytes: int
    gradient_bytes: int
    refit: list[str]
    """Requests of the refit's schedule that do not fit this rank's live model; number of all requests."""
    num_copies: int


def run_config(nodes: int, folder: Path) -> tuple[RunConfig, HfConfig]:
    """The packaged run on so many nodes of eight GPUs."""
    text = (ROOT / f"scripts/bench/models/{MODEL}.config.json").read_text()
    (folder / "config.json").write_text(text)
    # More replicas than prompts would have no work.
    changed = [
        f"policy.model_name={folder}",
        f"cluster.num_nodes={nodes}",
        f"grpo.num_prompts_per_step={max(128, nodes * 4)}",
    ]
    return load_config("grpo_nanov3.yaml", changed), json.loads(text)


def schedule_of(config: RunConfig, hf_config: HfConfig) -> Schedule:
    """The refit's, from the tables of Transformer Engine's layers, with the engines where a run places them."""
    parallel, world = config.policy.megatron_cfg.parallel, config.num_policy_ranks
    vllm = config.policy.generation.vllm_cfg
    workers = {slot: (index, ()) for engine in engine_slots(config) for index, slot in enumerate(engine.slots)}
    return RefitInputs(
        hf_config=hf_config,
        ranks=tuple(
            (parallel, parallel.coords_of(rank, world), config.policy.precision, "te") for rank in range(world)
        ),
        parallel=config.policy.generation.parallel,
        precision=vllm.precision,
        workers=workers,
        gpu_of={slot: slot for slot in workers},
        node_of={slot: slot // config.cluster.gpus_per_node for slot in range(config.num_slots)},
        buffer_bytes=int(config.policy.refit_buffer_size_gb * 1e9),
    ).schedule()


def row(config: RunConfig, hf_config: HfConfig, schedule: Schedule, rank: int) -> Row:
    """Builds the rank up to its optimizer and looks at it."""
    from megatron.core import parallel_state

    from mrl.policy.host_block import block_offsets
    from mrl.policy.optimizer import parts
    from mrl.policy.weights import table_name

    with as_rank(config.policy, rank, config.num_policy_ranks):
        built = Rank(config.policy, hf_config, "meta")
        buffers = [buffer for chunk in built.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        names = {
            parameter: table_name(name) for chunk in built.chunks for name, parameter in chunk.module.named_parameters()
        }
        shards = {}
        for optimizer in parts(built.optimizer):
            for parameter, (buffer, dtype, bucket) in optimizer.model_param_gbuf_map.items():
                owned = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
                start, stop = (owned["param"].start, owned["param"].end) if owned else (0, 0)
                shards[names[parameter]] = Shard(parameter.numel(), ".experts." in names[parameter], start, stop)
        held = [
            param
            for part in parts(built.optimizer)
            for group in part.optimizer.param_groups
            for param in group["params"]
        ]
        # As the arena moves them: the buffers of Megatron whole, and what is in none of them on its own.
        in_buffers = {id(parameter) for buffer in buffers for parameter in buffer.params}
        storages = [buffer.param_data.nbytes for buffer in buffers]
        storages += [tensor.nbytes for tensor in built.tensors.values() if id(tensor) not in in_buffers]
        faults, num_copies = refit_faults(built, schedule, rank)
        return Row(
            nodes=config.cluster.num_nodes,
            rank=rank,
            coords=(built.coords.tp, built.coords.pp, built.coords.ep, built.coords.etp),
            dense_replica=(
                parallel_state.get_data_parallel_rank(with_context_parallel=True),
                parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            ),
            expert_replica=(
                parallel_state.get_expert_data_parallel_rank(),
                parallel_state.get_expert_data_parallel_world_size(),
            ),
            shards=shards,
            main_elements=sum(param.numel() for param in held),
            bucket_remainders=[
                (end - begin) % buffer.data_parallel_world_size
                for buffer in buffers
                for begin, end in buffer.bucket_indices
            ],
            weight_bytes=sum(tensor.nbytes for tensor in built.tensors.values()),
            arena_bytes=block_offsets(storages)[1],
            gradient_bytes=sum(buffer.grad_data.nbytes for buffer in buffers),
            refit=faults,
            num_copies=num_copies,
        )


def refit_faults(built: Rank, schedule: Schedule, rank: int) -> tuple[list[str], int]:
    """Copies that the rank sends, or its GPU's engine worker reads, whose boxes its live weights lack; all copies."""
    tensors = {
        slot: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for slot, tensor in built.tensors.items()
    }
    holdings = [
        (copy.holders[item.source_class], copy.num_bytes)
        for deliveries in schedule.sent_by(rank)
        for item in deliveries
        for copy in item.message.copies
    ]
    holdings += [
        (pull.holding, pull.copy.num_bytes) for pulls in schedule.pulls(rank) for pull in pulls if pull.offset is None
    ]
    return [fault for holding, num_bytes in holdings if (fault := holding_fault(tensors, holding, num_bytes))], len(
        holdings
    )


def holding_fault(tensors: Mapping[Slot, tuple[tuple[int, ...], str]], holding: Holding, num_bytes: int) -> str:
    """Reason why a rank with these shapes and dtypes cannot read a box."""
    if holding.slot not in tensors:
        return f"{holding.slot} is not there"
    shape, dtype = tensors[holding.slot]
    if dtype != holding.dtype or len(shape) != len(holding.box):
        return f"{holding.slot} is {shape} {dtype}, not of {holding.dtype} with a box {holding.box}"
    if any(not 0 <= start < stop <= size for (start, stop), size in zip(holding.box, shape, strict=True)):
        return f"{holding.slot} is {shape} and has no box {holding.box}"
    wanted = volume(holding.box) * DTYPE_BYTES[dtype]
    return f"{holding.slot}: a box of {wanted} bytes, {num_bytes} in the schedule" if wanted != num_bytes else ""


def rows(folder: Path, wanted: list[tuple[int, int]]) -> Iterator[Row]:
    """Rows of node and rank."""
    for nodes in sorted({nodes for nodes, _ in wanted}):
        config, hf_config = run_config(nodes, folder)
        schedule = schedule_of(config, hf_config)
        for rank in (rank for of, rank in wanted if of == nodes):
            yield row(config, hf_config, schedule, rank)
