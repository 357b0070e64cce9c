"""What is due at a step of a training loop."""

from __future__ import annotations

from mrl.config.schema.run import CheckpointingConfig


def is_due(step: int, period: int) -> bool:
    """Whether something that happens every `period` steps happens at `step`; a period of 0 is never."""
    return period > 0 and step % period == 0


def is_save_due(step: int, checkpointing: CheckpointingConfig) -> bool:
    """Whether a checkpoint is written after `step`, whether or not it is the last."""
    return is_due(step, checkpointing.save_period) or is_due(step, checkpointing.ft_save_period or 0)
