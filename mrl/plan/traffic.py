# SPDX-License-Identifier: Apache-2.0
"""Bytes that a refit moves over each kind of link, from the schedule that a run would follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

from conversion.adapters import adapter_family, engine_adapter_family
from conversion.boxes import Layout
from conversion.families.common import read_by_engines
from conversion.reshard import reshard
from conversion.schedule import NUM_BUFFERS, Link
from mrl.config.held_adapters import held_adapters
from mrl.config.schema.run import RunConfig
from mrl.plan.facts import PlanModel


@dataclass(frozen=True)
class RefitTraffic:
    """One refit of all engines."""

    link_bytes: dict[Link, int]
    num_rounds: int
    busiest: dict[Link, int]
    """Bytes that the busiest GPU sends or receives, whichever is more: links carry both at once."""
    most_messages: int
    """Messages of the rank with the most, over all rounds."""


@dataclass(frozen=True)
class Ends:
    """Both ends of a refit, as `conversion.reshard.reshard` takes them."""

    sources: dict[int, Layout]
    targets: dict[int, Layout]
    gpu_of: dict[int, int]
    node_of: dict[int, int]


def refit_ends(config: RunConfig, model: PlanModel) -> Ends:
    """The layouts of a run's ranks, with Transformer Engine's specs, and of its engine workers, of what steps move."""
    parallel = config.policy.megatron_cfg.parallel
    world = config.num_policy_ranks
    vllm = config.policy.generation.vllm_cfg
    coords = [parallel.coords_of(rank, world) for rank in range(world)]
    engine = config.policy.generation.parallel
    held, source, target = held_adapters(config.policy), model.family, model.family
    if held is not None:
        source, target = adapter_family(source, held.layers, held.dim), engine_adapter_family(target, held)
    # Ranks with the same coordinates share one layout object, by which the schedule sees that they are equal.
    layouts = {
        place: read_by_engines(
            source.megatron_layout(model.hf_config, parallel, place, config.policy.precision, "te"), engine
        )
        for place in set(coords)
    }
    workers = [
        target.vllm_layout(model.hf_config, engine, worker, vllm.loaded_precision)
        for worker in range(engine.num_workers)
    ]
    first = world if config.num_dedicated_slots else 0
    gpus = {worker: first + worker for worker in range(config.num_engines * engine.num_workers)}
    return Ends(
        {rank: layouts[place] for rank, place in enumerate(coords)},
        {worker: workers[worker % engine.num_workers] for worker in gpus},
        gpus,
        {gpu: gpu // config.cluster.slots_per_node for gpu in range(config.num_slots)},
    )


def plan_refit(config: RunConfig, model: PlanModel) -> RefitTraffic:
    """The refit of a run. Takes about two seconds of work with hundreds of GPUs."""
    ends = refit_ends(config, model)
    schedule = reshard(
        ends.sources,
        ends.targets,
        gpu_of=ends.gpu_of,
        node_of=ends.node_of,
        buffer_bytes=int(config.policy.refit_buffer_size_gb * 1e9) // NUM_BUFFERS,
    )
    sent, received = Counter[tuple[Link, int]](), Counter[tuple[Link, int]]()
    messages = Counter[int]()
    for found in schedule.workers.values():
        of_class = schedule.classes[found.class_index]
        received["gpu", found.gpu] += of_class.own_bytes
        for source, rank, num_bytes in zip(of_class.sources, found.ranks, of_class.sent_bytes, strict=True):
            sent[source.link, rank] += num_bytes
            received[source.link, found.gpu] += num_bytes
            messages[rank] += len(source.messages)
    busiest = dict.fromkeys(schedule.link_bytes(), 0)
    for (link, _), num_bytes in chain(sent.items(), received.items()):
        busiest[link] = max(busiest[link], num_bytes)
    return RefitTraffic(schedule.link_bytes(), schedule.num_rounds, busiest, max(messages.values(), default=0))
