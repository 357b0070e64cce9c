# SPDX-License-Identifier: Apache-2.0
"""The table of metrics: where each is shown (console, report), its name in NeMo RL, and how its parts are combined."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """Places where a metric is shown. A metric in no table is written to files and loggers, under its own name."""

    line: str = ""
    """Line of the step's block on the console that shows it; see `mrl.store.console`."""
    text: str = ""
    """Text on that line."""
    chart: str = ""
    """Title of the report's chart that draws it."""
    nemo_rl: str = ""
    """NeMo RL's name, under which loggers get it."""


class EngineWork(NamedTuple):
    """Work of an engine in some time, or of several."""

    seconds: float = 0.0
    """Time with a rollout to work on."""
    num_drawn: int = 0
    """Tokens that it has drawn."""
    num_recomputed: int = 0
    """Tokens computed again, as the cache was too small for all rollouts that ran."""

    def plus(self, other: EngineWork) -> EngineWork:
        return EngineWork(
            self.seconds + other.seconds,
            self.num_drawn + other.num_drawn,
            self.num_recomputed + other.num_recomputed,
        )

    def since(self, earlier: EngineWork) -> EngineWork:
        return self.plus(EngineWork(-earlier.seconds, -earlier.num_drawn, -earlier.num_recomputed))


ACCURACY, PHASES, HIDDEN = (
    "Held-out accuracy, or mean reward",
    "Seconds by phase",
    "Seconds hidden behind other phases",
)
STACKED = (PHASES, HIDDEN)

METRICS: dict[str, Metric] = {
    "train/reward": Metric("Reward", "mean={:.2f}", "Reward"),
    "train/reward_std": Metric("Reward", "std={:.2f}", "Reward"),
    "train/reward_min": Metric("Reward", "min={:.1f}"),
    "train/reward_max": Metric("Reward", "max={:.1f}"),
    "rollout/*/reward": Metric(chart="Reward by environment"),
    "rollout/*/reward_std": Metric(chart="Reward by environment"),
    "rollout/*/reward_*": Metric(chart="Parts of the reward"),
    "val/*/reward_*": Metric(chart="Parts of the held-out reward"),
    "rollout/groups_without_signal": Metric(chart="Groups with equal rewards, which teach nothing"),
    "val/accuracy": Metric(chart=ACCURACY),
    "val/pass_k": Metric(chart=ACCURACY),
    "val/val_loss": Metric(chart="Held-out loss"),
    "val/validation-default_loss": Metric(chart="Held-out loss"),
    "train/accuracy": Metric(chart="Preferred answers that win"),
    "val/validation-default_accuracy": Metric(chart="Preferred answers that win"),
    "train/rewards_margin_mean": Metric(chart="Reward margin of the preferred answer"),
    "val/validation-default_rewards_margin_mean": Metric(chart="Reward margin of the preferred answer"),
    "rollout/mean_length": Metric(chart="Generated tokens per rollout", nemo_rl="train/mean_gen_tokens_per_sample"),
    "rollout/max_length": Metric(chart="Generated tokens per rollout", nemo_rl="train/max_gen_tokens_per_sample"),
    "rollout/mean_prompt_length": Metric(nemo_rl="train/mean_prompt_length"),
    "rollout/truncated_fraction": Metric(chart="Truncated rollouts, share", nemo_rl="train/truncation_rate"),
    "rollout/repetitive_fraction": Metric(chart="Repetitive replies, non-ASCII text, share"),
    "rollout/non_ascii_fraction": Metric(chart="Repetitive replies, non-ASCII text, share"),
    "train/entropy": Metric(chart="Entropy"),
    "train/approx_entropy": Metric(chart="Entropy"),
    "train/loss": Metric("Train", "loss={:.3f}", "Loss"),
    "train/kl_penalty": Metric("Train", "kl={:.3f}", "KL to the reference"),
    "train/gen_kl_error": Metric(chart="Engine against trainer, KL"),
    "train/clip_fraction": Metric(chart="Clipped tokens, share"),
    "train/kl_forward": Metric("Train", "kl_forward={:.4f}", "Student against teachers"),
    "train/kl_reverse": Metric("Train", "kl_reverse={:.4f}", "Student against teachers"),
    "train/teacher_gap/mean": Metric(
        chart="Student against teachers", nemo_rl="train/on_policy_distillation/teacher_student_logprob_gap_mean"
    ),
    "train/grad_norm": Metric("Train", "grad_norm={:.2f}", "Gradient norm"),
    "train/mtp_grad_norm": Metric(nemo_rl="train/mtp/grad_norm"),
    "train/critic/loss": Metric("critic", "loss={:.3f}"),
    "train/critic/explained_var": Metric(
        "critic", "explained_var={:.2f}", "Variance of returns that the critic explains"
    ),
    "train/mean_abs_dlogp": Metric(
        "Mrl", "mean |dlogp|={:.2e} (generator vs trainer)", "Engine against trainer, mean |dlogp|"
    ),
    "train/token_mult_prob_error": Metric("Mrl", "token_mult_prob_error={:.6f}"),
    "train/lr": Metric(chart="Learning rate"),
    "rollout/spec_acceptance_rate": Metric(chart="Accepted proposals", nemo_rl="train/vllm/spec_acceptance_rate"),
    "rollout/spec_acceptance_length": Metric(nemo_rl="train/vllm/spec_acceptance_length"),
    "train/mtp_1_acceptance_rate": Metric(chart="Accepted proposals"),
    "refit/seconds": Metric("Mrl", "refit={:.2f}s"),
    "refit/verified_bytes": Metric("Mrl", "verified={:,.0f} bytes"),
    "time/total": Metric(nemo_rl="timing/train/total_step_time"),
    "time/generation": Metric("Time", "gen={:.1f}s", PHASES, "timing/train/generation"),
    "time/reward": Metric("Time", "reward={:.1f}s", PHASES, "timing/train/reward_calculation"),
    # The logprob passes too, which NeMo RL times apart.
    "time/train": Metric("Time", "train={:.1f}s", PHASES, "timing/train/policy_training"),
    "time/teacher": Metric("Time", "teacher={:.1f}s", PHASES, "timing/train/teacher_logprob_inference"),
    "time/refit": Metric(chart=PHASES, nemo_rl="timing/train/prepare_for_generation/total"),
    "time/validation": Metric("Time", "val={:.1f}s", PHASES, "timing/validation/total_validation_time"),
    "time/checkpoint": Metric("Time", "ckpt={:.1f}s", PHASES, "timing/train/checkpointing"),
    "time/generation_hidden": Metric("hidden", "gen={:.1f}s", HIDDEN),
    "time/reward_hidden": Metric("hidden", "reward={:.1f}s", HIDDEN),
    "time/checkpoint_hidden": Metric("hidden", "ckpt={:.1f}s", HIDDEN),
    "rollout/tokens_per_s": Metric(chart="Tokens per second"),
    "rollout/recomputed_fraction": Metric(chart="Tokens computed again, for each one drawn"),
    "performance/tokens_per_sec_per_gpu": Metric(chart="Tokens per second"),
    "val/mean_length": Metric(nemo_rl="validation/avg_length"),
}

PREFIXES = {"time/": "timing/train/", "val/": "validation/", "train/mtp_": "train/mtp/mtp_"}
"""NeMo RL's prefix by ours, for metrics whose NeMo RL's name is not in the table."""

PERCENTAGES = re.compile(r"train/mtp/mtp_\d+_acceptance_rate")
"""Metrics that NeMo RL logs in percent, by its names; ours are shares."""

ATTEMPT = "logger/attempt"
"""Number of an attempt, in the first line that it writes."""
SKIPPED = "/num_skipped_updates"
"""Ends the names of counts of updates that were not finite, and changed nothing."""
NEMO_RL_RANKS = {"val:total_reward/mean": "val:accuracy", "train:total_reward/mean": "train:reward"}
"""Values of `checkpointing.metric_name` in NeMo RL's recipes -> ours."""
NUM_JUDGED = "num_judged"
"""Ends the names of counts of rollouts with a reward, over which the mean rewards beside them are."""
NONE_JUDGED = "no rollout has a reward"
NO_SIGNAL_IN_A_ROW = "train/num_steps_without_signal"
MASKED_IN_A_ROW = "train/num_masked_steps"
"""Steps in a row in which no rollout counted, up to this one."""
SKIPPED_IN_A_ROW = "train/num_skipped_in_a_row"
"""Steps in a row with such updates, up to this one."""

_UNLIKE = re.compile(
    r"(time|performance|memory|logger)/|.*(_s|seconds|_per_gpu|idle_fraction|weight_version|reward_queue_max|reward_restarts|"
    r"num_engine_restarts|num_engines|kept_groups|buffer_size|recomputed_fraction)$"
)


def repeats(name: str) -> bool:
    """Tells whether equal steps have equal values of a metric: not times, nor what counts since an attempt's start."""
    return _UNLIKE.match(name) is None


def nemo_rl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under NeMo RL's names and units, so that its dashboards go on working; other metrics keep ours."""
    named = {}
    for name, value in metrics.items():
        prefix = next((ours for ours in PREFIXES if name.startswith(ours)), "")
        theirs = METRICS.get(name, Metric()).nemo_rl or PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        named[theirs] = value * 100 if PERCENTAGES.fullmatch(theirs) else value
    return named


def shown_on(line: str, metrics: Mapping[str, float]) -> str:
    """Text of a console line for these metrics."""
    return ", ".join(
        _text(shown, metrics[name]) for name, shown in METRICS.items() if shown.line == line and name in metrics
    )


def _text(shown: Metric, value: float) -> str:
    """The text of a number; a loss that three decimals would call 0 has three digits."""
    return shown.text.replace(":.3f", ":.2e" if 0 < abs(value) < 0.0005 else ":.3f").format(value)


_COMPONENT = re.compile(r"(rollout|val)/[^/]+/reward_(?!std$)(.+)")
NUM_COMPONENTS = 4
"""Components of rewards that a console line has room for."""


def shown_components(metrics: Mapping[str, float], stage: str = "rollout") -> str:
    """The mean of each component of the rewards of training or validation, as in ` (near 0.33, length -0.01)`.

    "" if there are none, too many, or two of one name, of different environments.
    """
    matches = [(_COMPONENT.fullmatch(name), value) for name, value in metrics.items()]
    parts = [(match[2], value) for match, value in matches if match and match[1] == stage]
    found = dict(parts)
    if not 0 < len(found) == len(parts) <= NUM_COMPONENTS:
        return ""
    return f" ({', '.join(f'{name} {value:.2f}' for name, value in found.items())})"


def over_judged(text: str, num_judged: float, num_rollouts: float) -> str:
    """The text of a mean reward, with the number of judged rollouts where some were not."""
    if num_judged == num_rollouts:
        return text
    return f"{text}, over {num_judged:,.0f} of {num_rollouts:,.0f} judged" if num_judged else NONE_JUDGED


def for_decisions(name: str, metrics: Mapping[str, float]) -> float | None:
    """A metric by which a run ends or a checkpoint stays; None: absent.

    A validation of which little was judged must not look like the best: in its mean rewards, rollouts without a reward
    count as 0 here.
    """
    value, (section, _, quantity) = metrics.get(name), name.rpartition("/")
    num_judged = metrics.get(f"{section}/{NUM_JUDGED}")
    num_rollouts = metrics.get(f"{section}/num_rollouts", metrics.get(f"{section}/num_samples"))
    if value is None or quantity not in ("accuracy", "reward") or num_judged is None or not num_rollouts:
        return value
    return min(value, value * num_judged / num_rollouts)


def charts() -> list[tuple[str, list[str], str]]:
    """The charts of the report: title, names of metrics, and "stack" if these add up.

    In a name `*` is any environment; at its end, any component of its reward.
    """
    found: dict[str, list[str]] = {}
    for name, shown in METRICS.items():
        if shown.chart:
            found.setdefault(shown.chart, []).append(name)
    return [(title, names, "stack" if title in STACKED else "") for title, names in found.items()]


def extreme_of(name: str) -> Literal["min", "max"] | None:
    """Reduction of a metric over rows, ranks or updates, by its name; None where parts are added up or averaged."""
    words = name.rpartition("/")[2].split("_")
    return "min" if "min" in words else "max" if "max" in words else None


def metrics_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A step's metrics from those of its updates: sums of counts (`num_...`), extremes of extremes, means of others."""
    found = {}
    for name in updates[0]:
        values, is_count = [update[name] for update in updates], name.rpartition("/")[2].startswith("num_")
        extremes: dict[str | None, Callable[[list[float]], float]] = {"min": min, "max": max}
        found[name] = (
            extremes[extreme_of(name)](values) if extreme_of(name) else sum(values) / (1 if is_count else len(values))
        )
    return found


def metrics_of_passes(updates: Sequence[Mapping[str, float]], num_batches: int) -> dict[str, float]:
    """A step's metrics from the updates of its last pass over the batches; skipped ones are counted in all passes."""
    skipped = {name: sum(update[name] for update in updates) for name in updates[0] if name.endswith(SKIPPED)}
    return metrics_of_updates(updates[-num_batches:]) | skipped
