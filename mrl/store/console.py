"""The run's console output: the step block that tutorials show, one `[Mrl]` line, and the rollout progress line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from conversion.progress import Progress

logger = logging.getLogger(__name__)

HEADER_WIDTH = 62
# Without a terminal a progress line is written at most this often.
PLAIN_INTERVAL_S = 15.0

SUPERVISED_PHASES = {"train": "train", "validation": "val", "checkpoint": "ckpt"}
# Metrics that a training step's line shows after the loss, if the step has them.
SUPERVISED_SHOWN = ("perplexity", "accuracy", "rewards_margin_mean", "grad_norm", "lr")
# Work beside other phases, which `[Time]` does not count.
HIDDEN = {"gen": "time/generation_hidden", "reward": "time/reward_hidden", "ckpt": "time/checkpoint_hidden"}


def step_header(step: int, max_num_steps: int) -> str:
    """`========================= Step 1/100 =========================`."""
    title = f" Step {step}/{max_num_steps} "
    num_left = (HEADER_WIDTH - len(title) + 1) // 2
    return "=" * num_left + title + "=" * (HEADER_WIDTH - num_left - len(title))


def step_lines(metrics: Mapping[str, float], *, num_prompts: int, num_generations: int) -> list[str]:
    """The lines below the header, from a step's metrics. `ckpt=` appears where a checkpoint was written."""
    m = metrics
    times = f"gen={m['time/generation']:.1f}s, reward={m['time/reward']:.1f}s, train={m['time/train']:.1f}s"
    if "time/checkpoint" in m:
        times += f", ckpt={m['time/checkpoint']:.1f}s"
    num_rollouts = num_prompts * num_generations
    parts = [f"{label}={m[name]:.1f}s" for label, name in HIDDEN.items() if name in m]
    hidden = f", hidden: {', '.join(parts)}" if parts else ""
    rewards = f"min={m['train/reward_min']:.1f}, max={m['train/reward_max']:.1f}"
    return [
        f"[Generate] {num_prompts} prompts x {num_generations} generations = {num_rollouts} responses ({m['time/generation']:.1f}s)",
        f"[Reward]   mean={m['train/reward']:.2f}, std={m['train/reward_std']:.2f}, {rewards}",
        f"[Train]    loss={m['train/loss']:.3f}, kl={m['train/kl_penalty']:.3f}, grad_norm={m['train/grad_norm']:.2f}",
        f"[Time]     total={m['time/total']:.1f}s ({times})",
        f"[Mrl]      mean |dlogp|={m['train/mean_abs_dlogp']:.2e} (generator vs trainer), "
        f"token_mult_prob_error={m['train/token_mult_prob_error']:.6f}, "
        f"refit={m['refit/seconds']:.2f}s, verified={int(m['refit/verified_bytes']):,} bytes{hidden}",
    ]


def supervised_lines(metrics: Mapping[str, float]) -> list[str]:
    """The lines below the header of a step without rollouts."""
    shown = "".join(f", {name}={metrics[f'train/{name}']:.4g}" for name in SUPERVISED_SHOWN if f"train/{name}" in metrics)
    phases = [f"{label}={metrics[f'time/{name}']:.1f}s" for name, label in SUPERVISED_PHASES.items() if f"time/{name}" in metrics]
    return [
        f"[Train]    loss={metrics['train/loss']:.4f}{shown} ({int(metrics['train/num_valid_tokens']):,} tokens)",
        f"[Time]     total={metrics['time/total']:.1f}s ({', '.join(phases)})",
    ]


def rollout_progress(total: int) -> tqdm:
    """`Collecting rollouts:  21%|██        | 428/2048 [02:01<05:42, 4.73it/s]`, a bar in a terminal and plain lines elsewhere."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc="Collecting rollouts", ascii=False, leave=False, file=sys.stderr)
    return tqdm(total=total, desc="Collecting rollouts", ascii=False, ncols=80, mininterval=PLAIN_INTERVAL_S, file=_LineWriter())


class _LineWriter:
    """Turns tqdm's carriage returns into lines, so that log files stay readable."""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def bar_progress(what: str, terminal: TextIO) -> Progress:
    """A report of a conversion's progress as a bar with bytes, rate and time left."""
    bar: tqdm | None = None

    def report(done: int, total: int, kept: int) -> None:
        nonlocal bar
        bar = bar or tqdm(total=total, desc=what, unit="B", unit_scale=True, file=terminal)
        # Bytes kept from an earlier start do not count into the rate.
        bar.initial = kept
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return report
