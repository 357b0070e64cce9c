# SPDX-License-Identifier: Apache-2.0
"""Functions on the ranks of the tests of several models in a process: each alone, and all together, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName
from tests.stack.policy.policy_ranks import open_models, optimizer_checksum, packed_rows, raw_checksums, set_batch
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank


@dataclass
class Numbers:
    """Numbers that a model computed on one rank."""

    logprobs: list[np.ndarray] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    checksums: list[object] = field(default_factory=list)


def steps(model: PolicyRank, num_steps: int) -> Iterator[Numbers]:
    """Steps with an update and a pass after it; yields results so far after each part, so models can take turns."""
    from megatron.core import parallel_state

    found = Numbers()
    model.make_current()
    rows = packed_rows(model._section, model.dp_rank, parallel_state.get_data_parallel_world_size())
    for _ in range(num_steps):
        if model._role.is_mapped:
            model.enter("logprob")
            model.make_current()
            set_batch(model)
            model.compute_old_logprobs()
            yield found
            model.enter("train")
            found.metrics.append(model.train_step())
            yield found
            found.checksums.append((raw_checksums(model), optimizer_checksum(model)))
        else:
            model.enter("teacher")
        found.logprobs += model.logprobs_of_rows(rows)
        yield found


# What follows runs on a rank.


def numbers_alone(rank: Rank, name: ModelName, config: RunConfig, num_steps: int) -> Numbers:
    """Runs one model in a process of its own."""
    with open_models(rank, [(name, config)]) as (model,):
        return list(steps(model, num_steps))[-1]


def numbers_together(rank: Rank, configs: Sequence[tuple[ModelName, RunConfig]], num_steps: int) -> list[Numbers]:
    """Runs several models in one process, each a part at a time."""
    with open_models(rank, configs) as models:
        walks = dict(enumerate(steps(model, num_steps) for model in models))
        found: dict[int, Numbers] = {}
        while walks:
            for index, walk in list(walks.items()):
                numbers = next(walk, None)
                if numbers is None:
                    del walks[index]
                else:
                    found[index] = numbers
        return [found[index] for index in range(len(models))]


def moved_weights(rank: Rank, config: RunConfig) -> Mapping[str, bool]:
    """Checks a teacher whose weights leave and come back. Another block of memory stands for the host's."""
    from mrl.policy.host_block import HostStorages

    with open_models(rank, [("teacher", config)]) as (model,):
        model.enter("teacher")
        rows = packed_rows(model._section, model.dp_rank, 1)
        before = model.logprobs_of_rows(rows)
        tensors = list(model._tensors.values())
        for tensor in tensors:
            # On the CPU, memory that was shown to numpy cannot be given back.
            tensor.data = tensor.data.clone()
        copies = [tensor.clone() for tensor in tensors]
        storages = HostStorages(
            tensors, is_constant=True, allocate=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)
        )
        storages.place(is_on_device=False)
        is_away = all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        storages.place(is_on_device=True)
        is_back = all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))
        after = model.logprobs_of_rows(rows)
        trained = [parameter for chunk in model._chunks for parameter in chunk.parameters() if parameter.requires_grad]
        gradients = sum(
            buffer.grad_data.nbytes
            for chunk in model._chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        )
        return {
            "away": is_away,
            "back": is_back,
            "same": all(np.array_equal(*pair) for pair in zip(before, after, strict=True)) and len(before) > 0,
            "untrained": not trained and gradients == 0,
        }
