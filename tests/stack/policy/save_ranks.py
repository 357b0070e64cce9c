# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests of checkpoints run on the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from conversion.files.manifest import read_written
from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import main_shards, open_policy, raw_checksums, train
from tests.stack.ranks import Rank
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from mrl.policy.optimizer import TrainState
    from mrl.policy.policy import PolicyRank


TIMEOUT_S = HANG_S


def save(policy: PolicyRank, weights_dir: Path) -> None:
    """Writes a checkpoint, and waits for it."""
    assert policy.begin_save(weights_dir) == ""
    assert policy.finish_save(TIMEOUT_S).problem == ""


def save_at_once_and_late(
    rank: Rank, config: RunConfig, at_once: Path, late: Path
) -> tuple[bool, bool, list[str], list[str]]:
    """The same state, saved without and with `async_save`; the second's bytes are held back until after the next step.

    Whether they were written before, whether the step changed weights, the files that this rank wrote, and those of all
    ranks that whoever asks no rank reads of.
    """
    from mrl.policy.checkpoint import CheckpointWrite

    may_write, write_own = threading.Event(), CheckpointWrite._write_own

    def write_later(writing: CheckpointWrite, write: Callable[[], None]) -> object:
        assert may_write.wait(HANG_S)
        return write_own(writing, write)

    with open_policy(rank, config) as policy, pytest.MonkeyPatch.context() as patch:
        train(policy, 1)
        settings = config.policy.megatron_cfg.checkpoint
        settings.async_save = False
        save(policy, at_once)
        settings.async_save = True
        patch.setattr(CheckpointWrite, "_write_own", write_later)
        policy.begin_save(late)
        before = raw_checksums(policy)
        train(policy, 1)
        policy.settle()
        is_written = read_written(late) is not None
        may_write.set()
        wait_until(lambda: read_written(late) is not None, "what rank 0 leaves")
        told = sorted(name for report in read_written(late) or [] for name in report.files)
        return is_written, raw_checksums(policy) != before, sorted(policy.finish_save(TIMEOUT_S).files), told


def save_where_a_file_cannot_be_written(rank: Rank, config: RunConfig, weights_dir: Path) -> tuple[str, float]:
    """Saves in the background with a folder in this rank's file's way; the end's problem and the next step's loss."""
    (weights_dir / "iter_0000000" / f"__{rank.rank}_0.distcp").mkdir(parents=True)
    with open_policy(rank, config) as policy:
        train(policy, 1)
        policy.begin_save(weights_dir)
        return policy.finish_save(TIMEOUT_S).problem, train(policy, 1)[0]["train/loss"]


def save_after_steps(
    rank: Rank, config: RunConfig, weights_dir: Path, num_steps: int
) -> tuple[list[dict[str, float]], dict[str, int], list[str]]:
    """Saves after `num_steps`; metrics and checksums of the next two steps, and processes that the save left behind."""
    import multiprocessing

    with open_policy(rank, config) as policy:
        train(policy, num_steps)
        save(policy, weights_dir)
        children = [child.name for child in multiprocessing.active_children()]
        metrics = train(policy, 2)
        policy.settle()
        return metrics, raw_checksums(policy), children


def load_and_step(rank: Rank, config: RunConfig, weights_dir: Path) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Metrics and checksums of the two steps after a checkpoint, loaded into a policy after another number of steps."""
    with open_policy(rank, config) as policy:
        train(policy, 1)
        torch.rand(rank.rank + 3)
        policy.load_checkpoint(weights_dir)
        metrics = train(policy, 2)
        policy.settle()
        return metrics, raw_checksums(policy)


def load_as_on_the_host_and_step(
    rank: Rank, config: RunConfig, weights_dir: Path
) -> tuple[list[dict[str, float]], dict[str, int]]:
    """`load_and_step` with an optimizer that moves weights while its state loads, as under optimizer_cpu_offload."""
    from mrl.policy import checkpoint

    def load_after_a_step(source: Any, state: TrainState, *rest: Any) -> None:
        for chunk in state.chunks:
            for parameter in chunk.parameters():
                parameter.data.add_(1)
        load(source, state, *rest)

    load = checkpoint._load_optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_load_optimizer", load_after_a_step)
        patch.setattr(
            checkpoint, "hybrids", lambda optimizer: [SimpleNamespace(_sync_hdo_state_to_sub_optimizers=lambda: None)]
        )
        return load_and_step(rank, config, weights_dir)


def settings_after_load(
    rank: Rank, config: RunConfig, weights_dir: Path, num_steps: int
) -> tuple[list[dict[str, object]], list[dict[str, object]], list[float]]:
    """Settings beside the parameters in a fresh run at a step and after loading its checkpoint; the next two rates."""
    with open_policy(rank, config) as policy:
        policy._state.scheduler.step(num_steps)
        fresh = settings_of(policy)
        policy._state.scheduler.step(-num_steps)
        # An entry of Transformer Engine's FusedAdam, which reads it at each step, and which no checkpoint of a CPU host
        # has.
        for group in policy._state.optimizer.param_groups:
            group["bias_correction"] = True
        policy.load_checkpoint(weights_dir)
        assert all(group.pop("bias_correction") for group in policy._state.optimizer.param_groups)
        return fresh, settings_of(policy), [metrics["train/lr"] for metrics in train(policy, 2)]


def settings_of(policy: PolicyRank) -> list[dict[str, object]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in policy._state.optimizer.param_groups
    ]


def load_weights_only(rank: Rank, config: RunConfig, weights_dir: Path) -> tuple[bool, float]:
    """Compares main parameters with a checkpoint without optimizer state; returns that, and the loss after a step."""
    with open_policy(rank, config) as policy:
        policy.load_checkpoint(weights_dir)
        weights = {
            str(slot): tensor.detach().float().flatten().numpy() for slot, tensor in policy.settled_weights().items()
        }
        is_same = all(
            np.array_equal(values, weights[name][start : start + len(values)])
            for name, start, values in main_shards(policy)
        )
        return is_same, train(policy, 2)[1]["train/loss"]


def save_random_states(rank: Rank, config: RunConfig, weights_dir: Path) -> list[bytes]:
    """Draws numbers, other ones on every rank, and saves."""
    with open_policy(rank, config) as policy:
        train(policy, 1)
        torch.rand(rank.rank + 3)
        save(policy, weights_dir)
        return random_states()


def load_random_states(rank: Rank, config: RunConfig, weights_dir: Path) -> list[bytes]:
    with open_policy(rank, config) as policy:
        policy.load_checkpoint(weights_dir)
        return random_states()


def random_states() -> list[bytes]:
    """Bytes of the state of every generator of this rank."""
    from megatron.core import tensor_parallel

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    return [torch.get_rng_state().numpy().tobytes(), *(states[name].numpy().tobytes() for name in sorted(states))]
