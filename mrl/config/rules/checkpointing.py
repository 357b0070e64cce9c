"""Whether checkpoints can be ranked, kept and written as section `checkpointing` says."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from mrl.config.errors import Problems, Unprovided
from mrl.config.schema.run import RunConfig


def check_checkpointing(config: RunConfig, problems: Problems) -> None:
    """Adds a problem for every rule of the section that the run cannot follow."""
    checkpointing = config.checkpointing
    if checkpointing.ft_save_period is not None and checkpointing.ft_keep_latest_k is None:
        rule = "it needs checkpointing.ft_keep_latest_k, the number of these checkpoints that are kept"
        problems.add("checkpointing.ft_save_period", rule, "set it, for example to 1")
    metric_name = checkpointing.metric_name
    if metric_name is not None:
        stage, _, metric = metric_name.partition(":")
        if stage not in ("train", "val") or not metric:
            rule = "must be train:<metric> or val:<metric>"
            problems.add("checkpointing.metric_name", rule, "write for example val:accuracy, or null")
        elif stage == "val" and checkpointing.enabled and not config.data.has_validation:
            rule = "there is no validation, because data.validation=null and no training rows are held out"
            problems.add("checkpointing.metric_name", rule, "use train:reward, or give data.validation")
    limit = checkpointing.checkpoint_must_save_by
    if limit is not None and not re.fullmatch(r"\d{1,4}:\d{1,2}:\d{1,2}:\d{1,2}", limit):
        problems.add("checkpointing.checkpoint_must_save_by", "must be DD:HH:MM:SS after the start", "write for example 00:03:40:00")


@dataclass(frozen=True)
class CheckpointDemand:
    """What the checkpoints of a run take of their disk."""

    num_kept: int
    checkpoint_bytes: int
    needed_bytes: int
    """Of those still to be written and kept, and one written aside."""
    free_bytes: int


def checkpoint_demand(config: RunConfig, num_parameters: int) -> CheckpointDemand:
    """The disk that the checkpoints of a run want, and have.

    Where all that the run saves are kept, their number is not known before the end: then it is one that has to fit.
    """
    checkpointing = config.checkpointing
    weights = 2 if config.policy.precision == "bfloat16" else 4
    # Main parameter and both moments, in float32; those of adapters are next to nothing.
    optimizer = 12 if checkpointing.save_optimizer and not config.policy.megatron_cfg.peft.enabled else 0
    checkpoint_bytes = num_parameters * (weights + optimizer)
    num_present = sum(1 for path in Path(checkpointing.checkpoint_dir).glob("step_*") if path.is_dir())
    num_kept = num_kept_at_most(config) or 1
    needed = checkpoint_bytes * (max(0, num_kept - num_present) + 1)
    return CheckpointDemand(num_kept, checkpoint_bytes, needed, shutil.disk_usage(existing_parent(checkpointing.checkpoint_dir)).free)


def check_disk(config: RunConfig, num_parameters: int, problems: Problems) -> None:
    """Adds a problem if the checkpoints of the run do not fit on their disk."""
    if not config.checkpointing.enabled:
        return
    demand = checkpoint_demand(config, num_parameters)
    if demand.needed_bytes > demand.free_bytes:
        rule = (
            f"{demand.num_kept} checkpoints of {demand.checkpoint_bytes / 1e9:.2f} GB and one being written need "
            f"{demand.needed_bytes / 1e9:.2f} GB more, {demand.free_bytes / 1e9:.2f} GB are free"
        )
        way_out = "free or choose another disk, or lower checkpointing.keep_top_k"
        problems.add("checkpointing.checkpoint_dir", rule, way_out, Unprovided)


def num_kept_at_most(config: RunConfig) -> int | None:
    """How many checkpoints are kept at the same time, if that is bounded by less than the steps of the run."""
    checkpointing = config.checkpointing
    # keep_top_k of a million is how NeMo RL's files say "all".
    if checkpointing.keep_top_k is None or checkpointing.keep_top_k >= config.grpo.max_num_steps // checkpointing.save_period:
        return None
    return checkpointing.keep_top_k + (checkpointing.ft_keep_latest_k or 1)


def existing_parent(folder: str) -> Path:
    """The folder itself, or the nearest above it that exists."""
    path = Path(folder).absolute()
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
