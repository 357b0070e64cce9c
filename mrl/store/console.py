# SPDX-License-Identifier: Apache-2.0
"""The run's console output: the step block that tutorials show, one `[Mrl]` line, and the rollout progress line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from tqdm import tqdm

from conversion.progress import Progress
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import STORY
from mrl.metrics import NUM_JUDGED, over_judged, shown_components, shown_on

logger = logging.getLogger(__name__)
story = logging.getLogger(STORY)

HEADER_WIDTH = 62
PLAIN_INTERVAL_S = 15.0

SUPERVISED_PHASES = {"train": "train", "validation": "val", "checkpoint": "ckpt"}
SUPERVISED_SHOWN = ("perplexity", "accuracy", "rewards_margin_mean", "grad_norm", "lr")


def outlook(config: RunConfig, *, first_step: int, last_step: int, start_s: float | None, step_s: float | None) -> str:
    """The line that says what the attempt does next; with seconds where earlier steps of the run have measured them."""
    engines = f" and {config.num_engines} engine{'s' * (config.num_engines > 1)}" if config.has_engines else ""
    num_ranks, num_steps = config.num_policy_ranks, last_step - first_step + 1
    text = f"Next: start {num_ranks} policy rank{'s' * (num_ranks > 1)}{engines}"
    text += f" ({start_s:.0f} s the last time)" if start_s is not None else ""
    if num_steps < 1:
        text += f", then no step, as step {first_step - 1} of {last_step} is done"
    else:
        text += (
            f", then {num_steps} steps, {first_step} to {last_step}" if num_steps > 1 else f", then step {last_step}"
        )
    if step_s is not None and num_steps > 0:
        text += f" (about {step_s:.1f} s each, {timedelta(seconds=round(step_s * num_steps))} in all)"
    validates = config.training.val_period and config.data.has_validation
    periods = [f"validation every {config.training.val_period}"] if validates else []
    periods += [f"a checkpoint every {config.checkpointing.save_period}"] if config.checkpointing.enabled else []
    return "; ".join([text, *periods])


def step_header(step: int, max_num_steps: int) -> str:
    """`========================= Step 1/100 =========================`."""
    title = f" Step {step}/{max_num_steps} "
    num_left = (HEADER_WIDTH - len(title) + 1) // 2
    return "=" * num_left + title + "=" * (HEADER_WIDTH - num_left - len(title))


def step_lines(
    metrics: Mapping[str, float], *, num_prompts: int, num_generations: int, has_kl: bool = True
) -> list[str]:
    """The lines below the header, from a step's metrics: `ckpt=` where a checkpoint was written, `kl=` if `has_kl`."""
    metrics = {name: value for name, value in metrics.items() if has_kl or name != "train/kl_penalty"}
    num_rollouts = num_prompts * num_generations
    num_judged = metrics.get(f"rollout/{NUM_JUDGED}", 0.0)
    train, critic = shown_on("Train", metrics), shown_on("critic", metrics)
    engines, hidden = shown_on("Mrl", metrics), shown_on("hidden", metrics)
    if "refit/seconds" not in metrics:
        engines = ", ".join(filter(None, [engines, "engines keep their weights"]))
    rewards = over_judged(shown_on("Reward", metrics), num_judged, metrics.get("rollout/num_rollouts", 0.0))
    generation_s, total_s = metrics.get("time/generation", 0.0), metrics["time/total"]
    sampled = metrics.get("rollout/num_rollouts", num_rollouts)
    of_all = f" of {sampled:g}" if sampled > num_rollouts else ""  # dynamic sampling leaves the others out
    return [
        (
            f"[Generate] {num_prompts} prompts x {num_generations} generations = {num_rollouts} responses{of_all} "
            f"({generation_s:.1f}s)"
        ),
        f"[Reward]   {rewards}{shown_components(metrics)}",
        f"[Train]    {train or 'the critic alone learns'}" + (f"; critic: {critic}" if critic else ""),
        f"[Time]     total={total_s:.1f}s ({shown_on('Time', metrics)})",
        f"[Mrl]      {engines}" + (f", hidden: {hidden}" if hidden else ""),
    ]


def supervised_lines(metrics: Mapping[str, float]) -> list[str]:
    """The lines below the header of a step without rollouts."""
    shown = "".join(
        f", {name}={metrics[f'train/{name}']:.4g}" for name in SUPERVISED_SHOWN if f"train/{name}" in metrics
    )
    phases = [
        f"{label}={metrics[f'time/{name}']:.1f}s"
        for name, label in SUPERVISED_PHASES.items()
        if f"time/{name}" in metrics
    ]
    return [
        f"[Train]    loss={metrics['train/loss']:.4f}{shown} ({int(metrics['train/num_valid_tokens']):,} tokens)",
        f"[Time]     total={metrics['time/total']:.1f}s ({', '.join(phases)})",
    ]


def rollout_progress(total: int) -> tqdm:
    """`Collecting rollouts:  21%|██        | 428/2048 [02:01<05:42, 4.73it/s]`, a terminal bar, else plain lines."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc="Collecting rollouts", ascii=False, leave=False, file=sys.stderr)
    return tqdm(
        total=total, desc="Collecting rollouts", ascii=False, ncols=80, mininterval=PLAIN_INTERVAL_S, file=_LineWriter()
    )


class _LineWriter:
    """Turns tqdm's carriage returns into lines of the log, which a full disk cannot fail; leaves out that of 0%."""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line and "| 0/" not in line:
            story.info("%s", line)

    def flush(self) -> None: ...


def bar_progress(what: str, terminal: TextIO) -> Progress:
    """A report of a conversion's progress as a bar with bytes, rate and time left."""
    bar: tqdm | None = None

    def report(done: int, total: int, kept: int) -> None:
        nonlocal bar
        bar = bar or tqdm(total=total, desc=what, unit="B", unit_scale=True, file=terminal)
        bar.initial = kept
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return report
