# SPDX-License-Identifier: Apache-2.0
"""Section `deadlines`: seconds after which what has not come counts as hanging. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.fields import AboveZero


@dataclass
class DeadlinesConfig:
    start_s: AboveZero | None = None
    """Seconds until all processes hold their weights; null = by the size of the weights: `--check` prints it."""
    generate_s: AboveZero = 600.0
    """Seconds without a finished rollout after which generation has failed."""
    reward_s: AboveZero = 120.0
    """Seconds, beyond the longest `env.NAME.timeout_s`, in which no worker begins or ends a rollout: then rewards have
    failed.

    Rollouts that wait for a worker are waited for; the metric `rollout/reward_wait_s` says how long.
    """
    train_s: AboveZero | None = None
    """Seconds for one logprob pass or train step; null = by model, tokens and GPUs: `--check` prints it."""
    refit_s: AboveZero = 300.0
    """Seconds for one refit."""
    checkpoint_s: AboveZero | None = None
    """Seconds to save, to check or to load a checkpoint; null = by its size and the nodes: `--check` prints it."""
    notice_s: AboveZero = 50.0
    """Seconds without progress after which the driver names the process that hangs, within a minute, and keeps
    everybody's stacks.
    """
