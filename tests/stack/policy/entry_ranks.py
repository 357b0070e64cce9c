# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests of checkpoint entries run on the ranks."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import open_policy, optimizers, raw_checksums, train
from tests.stack.policy.save_ranks import save
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank


@dataclass
class Cost:
    """Cost of a save and a load for one rank, in bytes."""

    checkpoint_bytes: int
    """Weights and optimizer state of all ranks, each once."""
    save_growth: int
    """Peak growth of resident memory."""
    load_growth: int
    read_bytes: int
    is_same: bool
    """True if weights and optimizer state came back bit for bit."""


def cost_of_a_save_and_a_load(rank: Rank, config: RunConfig, weights_dir: Path) -> Cost:
    """Saves after a step, takes another one, and loads. Ranks are replicas, their weights bfloat16."""
    with open_policy(rank, config) as policy:
        saved = _state_after_a_step(policy)
        num_weights = sum(tensor.numel() for tensor in policy._tensors.values())
        with _peak_growth() as save_growth:
            save(policy, weights_dir)
        assert _state_after_a_step(policy) != saved
        with _peak_growth() as load_growth, _reads() as lengths:
            policy.load_checkpoint(weights_dir)
        return Cost(14 * num_weights, save_growth[0], load_growth[0], sum(lengths), _state(policy) == saved)


def load_with_small_buckets(rank: Rank, config: RunConfig, weights_dir: Path, bucket_size: int) -> tuple[int, bool]:
    """This rank's gradient bucket count, of some `bucket_size` elements, and whether a load restores what was saved."""
    from mrl.policy import model

    with pytest.MonkeyPatch.context() as patch:
        cut = functools.partial(model.DistributedDataParallelConfig, bucket_size=bucket_size)
        patch.setattr(model, "DistributedDataParallelConfig", cut)
        with open_policy(rank, config) as policy:
            saved = _state_after_a_step(policy)
            save(policy, weights_dir)
            assert _state_after_a_step(policy) != saved
            policy.load_checkpoint(weights_dir)
            num_buckets = sum(len(buffer.buckets) for optimizer in optimizers(policy) for buffer in optimizer.buffers)
            return num_buckets, _state(policy) == saved


def save_both_ways(rank: Rank, config: RunConfig, ours: Path, megatrons: Path) -> tuple[bool, bool]:
    """Saves the same state by our entries and by Megatron's. Whether each loads the other's checkpoint bit for bit."""
    from mrl.policy import checkpoint, checkpoint_entries

    with open_policy(rank, config) as policy:
        saved = _state_after_a_step(policy)
        save(policy, ours)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_entries, "written_here", lambda entries: entries)
            patch.setattr(checkpoint, "_distributed", lambda state: [])
            save(policy, megatrons)
        assert _state_after_a_step(policy) != saved
        policy.load_checkpoint(megatrons)
        is_read_here = _state(policy) == saved
        assert _state_after_a_step(policy) != saved
        _load_as_megatron_does(policy, ours / checkpoint.ITERATION_FOLDER)
        return is_read_here, _state(policy) == saved


@torch.no_grad()
def _load_as_megatron_does(policy: PolicyRank, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    from mrl.policy import checkpoint

    weights, _ = checkpoint._model_state(policy._state)
    live = {name: entry.data for name, entry in weights.items()}
    optimizer = policy._state.optimizer.sharded_state_dict(weights, is_loading=True, metadata=checkpoint._metadata())
    loaded = dist_checkpointing.load({"weights": weights, "optimizer": optimizer}, str(folder))
    for name, tensor in live.items():
        tensor.copy_(loaded["weights"][name])
    policy._state.optimizer.load_state_dict(loaded["optimizer"])


def _state_after_a_step(policy: PolicyRank) -> dict[str, int]:
    train(policy, 1)
    policy.settle()
    return _state(policy)


def _state(policy: PolicyRank) -> dict[str, int]:
    """crc32 of every weight and of all that the optimizer keeps on this rank."""
    sums = raw_checksums(policy)
    for part, optimizer in enumerate(optimizers(policy)):
        for index, parameter in enumerate(optimizer.model_param_gbuf_map):
            kept = optimizer._get_main_param_and_optimizer_states(parameter)
            sums |= {
                f"{part} {index} {kind}": zlib.crc32(kept[kind].detach().numpy().data)
                for kind in ("param", "exp_avg", "exp_avg_sq")
            }
    return sums


@contextmanager
def _peak_growth() -> Iterator[list[int]]:
    """Afterwards, by how many bytes the resident memory of this process has grown at its peak."""
    # Memory that was freed but kept would hide growth.
    ctypes.CDLL(None).malloc_trim(0)
    before, growth = _resident("VmRSS"), []
    # The peak from here on.
    Path("/proc/self/clear_refs").write_text("5")
    yield growth
    growth.append(_resident("VmHWM") - before)


def _resident(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def _reads() -> Iterator[list[int]]:
    """Bytes that each read of a tensor's content gave."""
    lengths, read = [], os.preadv

    def counted(file: int, buffers: list[memoryview], offset: int) -> int:
        lengths.append(read(file, buffers, offset))
        return lengths[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        yield lengths
