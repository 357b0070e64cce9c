# SPDX-License-Identifier: Apache-2.0
"""Functions that tests of hostile checkpoints run on a rank: one policy that is given checkpoint after checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import pytest

from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import open_policy, raw_checksums, train
from tests.stack.policy.save_ranks import save
from tests.stack.ranks import Rank
from tests.waiting import HANG_S

PATIENCE_S = round(HANG_S)


def save_one(rank: Rank, config: RunConfig, weights_dir: Path) -> None:
    """Writes a checkpoint after a step."""
    with open_policy(rank, config) as policy:
        train(policy, 1)
        save(policy, weights_dir)


def load_all(
    rank: Rank, config: RunConfig, honest: Path, resumed: list[Path], cached: list[Path]
) -> tuple[bool, list[str]]:
    """True when the honest checkpoint loads, and the message of each load of the others; "" where it went through."""
    messages = []
    with open_policy(rank, config) as policy, pytest.MonkeyPatch.context() as patch:
        # A user may have set it for other files.
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        before = raw_checksums(policy)
        policy.load_checkpoint(honest)
        is_loaded = raw_checksums(policy) != before
        signal.signal(signal.SIGALRM, _out_of_patience)
        for folder in (*resumed, *cached):
            signal.alarm(PATIENCE_S)
            try:
                (policy.load_mcore if folder in cached else policy.load_checkpoint)(folder)
                messages.append("")
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
            finally:
                signal.alarm(0)
    return is_loaded, messages


def _out_of_patience(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"the load waits for more than {PATIENCE_S} s")
