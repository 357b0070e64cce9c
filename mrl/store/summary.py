# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step: of its rollouts, of its updates, and the wall time of its phases."""

from __future__ import annotations

import functools
import logging
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import numpy as np

from mrl import spans
from mrl.algo.rewards import has_signal, shaped_rewards_of
from mrl.config.schema.algo import GrpoConfig
from mrl.config.schema.run import RunConfig
from mrl.data.planning import sequence_cost
from mrl.metrics import NUM_JUDGED, for_decisions
from mrl.store.evaluations import mean_pass_at_k, reward_metrics
from mrl.types import Batch, Proposals, RolloutGroup, Status

logger = logging.getLogger(__name__)

TEXT_END, REPETITIVE = 4_000, 10
"""Characters at a text's end that are looked at: loops end a text. 2,048 texts take a tenth of a second."""
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 80GB HBM3": 989.5,
    "H200": 989.5,
    "GB200": 2450.0,
    "GB300": 2450.0,
    "B200": 2250.0,
    "B300": 2250.0,
}
"""Peak of dense bfloat16 products, by a part of the device's name: NVIDIA's data sheets, with NeMo RL's numbers."""


class Clock:
    """Adds up seconds by phase; `metrics()` gives `time/<phase>` and `time/total` since the clock was made.

    Of work that began during earlier phases, `time/<phase>` is the part that the run waited for, and
    `time/<phase>_hidden` the rest.
    """

    def __init__(self, step: int | None = None) -> None:
        """With `step`, `metrics()` ends the span of this step."""
        self._step = step
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._work: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the `with` block towards `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start
            spans.add(name, start)

    def overlap(self, name: str, work_s: float) -> None:
        """Notes that the work of phase `name` took `work_s` in all, some of it during other phases."""
        self._work[name] = self._work.get(name, 0.0) + work_s

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        hidden = {f"time/{name}_hidden": max(0.0, work_s - self._seconds[name]) for name, work_s in self._work.items()}
        if self._step is not None:
            spans.add("step", self._start, step=self._step)
        exposed = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return exposed | hidden | {"time/total": time.monotonic() - self._start}


def rollout_metrics(
    groups: Sequence[RolloutGroup],
    grpo: GrpoConfig,
    *,
    seconds: float,
    num_engine_restarts: int,
    num_drawn: int = 0,
) -> dict[str, float]:
    """Rewards (scaled and shaped, of rollouts with one), lengths and rates of a step whose generation took `seconds`.

    In these the engines drew `num_drawn` tokens, also of groups that later steps take. Where that is unknown (0), it is
    the tokens of `groups` without kept ones, which an earlier attempt has sampled.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = shaped_rewards_of(groups, grpo)
    own = reward_metrics(rewards)
    lengths = np.array([rollout.num_trained for rollout in rollouts])
    num_kept = sum(group.is_kept for group in groups)
    num_drawn = num_drawn or int(lengths.sum()) - sum(group.num_kept_tokens for group in groups)
    return {
        **{f"train/{name}": value for name, value in own.items() if name != NUM_JUDGED},
        **({"train/reward_min": min(rewards), "train/reward_max": max(rewards)} if rewards else {}),
        "rollout/mean_length": float(lengths.mean()),
        "rollout/max_length": float(lengths.max()),
        "rollout/mean_prompt_length": float(np.mean([rollout.prompt_length for rollout in rollouts])),
        "rollout/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        **text_metrics([verdict.text for verdict in verdicts if verdict.text]),
        "rollout/num_rollouts": float(len(verdicts)),
        f"rollout/{NUM_JUDGED}": own[NUM_JUDGED],
        "rollout/failed": float(sum(not verdict.is_valid for verdict in verdicts)),
        "rollout/groups_without_signal": float(sum(not has_signal(group, grpo) for group in groups)),
        "rollout/engine_restarts": float(num_engine_restarts),
        "rollout/tokens_per_s": num_drawn / seconds,
        **({"rollout/kept_groups": float(num_kept)} if num_kept else {}),
        **_speculation_metrics([rollout.proposals for rollout in rollouts]),
        **environment_metrics(groups, stage="rollout"),
    }


def text_metrics(texts: Sequence[str]) -> dict[str, float]:
    """Shares of repetitive texts and of characters beyond ASCII, in the last `TEXT_END` characters of each text.

    A text that zlib makes `REPETITIVE` times smaller repeats itself: prose of that length becomes 2 to 3 times smaller.
    """
    ends = [text[-TEXT_END:].encode(errors="replace") for text in texts]
    if not ends:
        return {}
    num_repetitive = sum(len(zlib.compress(end, 1)) * REPETITIVE < len(end) for end in ends)
    num_ascii = sum(len(text[-TEXT_END:].encode("ascii", "ignore")) for text in texts)
    return {
        "rollout/repetitive_fraction": num_repetitive / len(ends),
        "rollout/non_ascii_fraction": 1 - num_ascii / sum(len(text[-TEXT_END:]) for text in texts),
    }


def _speculation_metrics(proposals: Sequence[Proposals]) -> dict[str, float]:
    """Quality of proposed tokens, if any were proposed: the share accepted, and mean length from one forward pass."""
    total = functools.reduce(Proposals.plus, proposals, Proposals())
    if not total.num_tokens:
        return {}
    return {
        "rollout/spec_acceptance_rate": total.num_accepted / total.num_tokens,
        "rollout/spec_acceptance_length": 1 + total.num_accepted / total.num_rounds,
    }


def performance_metrics(
    config: RunConfig, batches: Sequence[Batch], metrics: Mapping[str, float], *, device: str
) -> dict[str, float]:
    """Tokens a second and TFLOPS per GPU (else per rank) in a step, by NeMo RL's names, from its batches and times.

    The operations are those of the models, whatever is recomputed: three forward passes for an update, of LoRA two, and
    one for a logprob pass, or for the values of a critic. Their share of the peak, `train_fp_utilization` (MFU), is
    known for bfloat16 on the devices of `PEAK_TFLOPS`.
    """
    lengths = [sequence.rollout.num_tokens for batch in batches for sequence in batch.sequences]
    seconds = metrics["time/train"] * config.num_policy_ranks
    num_updates = config.num_passes if "train/loss" in metrics or not config.has_critic else 0
    work = [
        (
            sequence_cost(config.policy.model_name, config.mtp_steps),
            (2 if config.policy.megatron_cfg.peft.enabled else 3) * num_updates,
        ),
        (sequence_cost(config.policy.model_name), metrics["train/num_logprob_passes"]),
    ]
    if config.has_critic:
        work.append((sequence_cost(config.value.model_name), 3 * config.num_passes + 1))
    operations = 0.0
    for cost, num_passes in work:
        operations += num_passes * sum(cost.of(length) + cost.scan_per_token * length for length in lengths)
    tflops = operations / seconds / 1e12
    found = {
        "tokens_per_sec_per_gpu": sum(lengths) / metrics["time/total"] / config.num_slots,
        "policy_training_tokens_per_sec_per_gpu": sum(lengths) / seconds,
        "train_flops_per_gpu": tflops,
    }
    if config.has_engines:
        num_workers = config.num_engines * config.policy.generation.num_workers
        found["generation_tokens_per_sec_per_gpu"] = metrics["rollout/tokens_per_s"] / num_workers
    peak = next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
    if peak is not None and config.policy.precision == "bfloat16":
        found["train_fp_utilization"] = tflops / peak
    return {f"performance/{name}": value for name, value in found.items()}


OWN_NAMES = {"reward", "reward_std", "num_rollouts", NUM_JUDGED, "turns", "failed", *get_args(Status)}
"""Quantities of mrl's: an agent's metric of such a name is another one."""


def environment_metrics(groups: Sequence[RolloutGroup], *, stage: Literal["rollout", "val"]) -> dict[str, float]:
    """`<stage>/<environment>/*`: mean and spread of rewards, mean turns, counts of failed and flagged rollouts."""
    metrics: dict[str, float] = {}
    for name in sorted({group.prompt.env_name for group in groups}):
        mine = [group for group in groups if group.prompt.env_name == name]
        verdicts = [verdict for group in mine for verdict in group.verdicts]
        judged = [verdict for verdict in verdicts if verdict.has_reward]
        counts = Counter(verdict.status for verdict in verdicts if not verdict.is_valid)
        counts.update(flag for verdict in verdicts for flag in verdict.flags)
        values = {
            **reward_metrics([verdict.reward for verdict in judged]),
            "num_rollouts": float(len(verdicts)),
            "turns": float(np.mean([rollout.num_turns for group in mine for rollout in group.rollouts])),
            "failed": float(sum(not verdict.is_valid for verdict in verdicts)),
        }
        values |= {kind: float(count) for kind, count in counts.items()}
        for part in sorted({part for verdict in judged for part in verdict.components}):
            values[f"reward_{part}"] = float(np.mean([verdict.components.get(part, 0.0) for verdict in judged]))
        for part in sorted({part for verdict in verdicts for part in verdict.metrics}):
            key = f"own_{part}" if part in OWN_NAMES else part
            values[key] = float(np.mean([verdict.metrics.get(part, 0.0) for verdict in verdicts]))
        metrics |= {f"{stage}/{name}/{quantity}": value for quantity, value in values.items()}
    return metrics


def validation_metrics(groups: Sequence[RolloutGroup], *, is_accuracy: bool) -> dict[str, float]:
    """Mean reward over held-out rollouts, and pass@k, in which a rollout without a reward solves nothing.

    The mean, of `reward_metrics`, is `val/accuracy`, NeMo RL's name; unless `is_accuracy` it is `val/reward`, too, and
    is shown as that.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    found = reward_metrics([verdict.reward for verdict in verdicts if verdict.has_reward])
    means = {"val/accuracy": found["reward"], "val/reward": found["reward"]} if "reward" in found else {}
    if is_accuracy:
        means.pop("val/reward", None)
    solved = [[verdict.has_reward and verdict.reward > 0 for verdict in group.verdicts] for group in groups]
    num_rollouts = min(map(len, solved))
    fewer = (2**power for power in range(num_rollouts.bit_length()) if 2**power < num_rollouts)
    return {
        **means,
        f"val/{NUM_JUDGED}": found[NUM_JUDGED],
        "val/mean_length": float(np.mean([rollout.num_trained for group in groups for rollout in group.rollouts])),
        "val/failed": float(sum(not verdict.is_valid for verdict in verdicts)),
        "val/num_samples": float(len(verdicts)),
        **{f"val/pass_at_{k}": mean_pass_at_k(solved, k) for k in fewer},
        **({"val/pass_k": mean_pass_at_k(solved, num_rollouts)} if num_rollouts > 1 else {}),
        **environment_metrics(groups, stage="val"),
    }


def warn_of_bounded_ratios(metrics: Mapping[str, float]) -> None:
    """Warns if the loss has bounded ratios or correction weights of a step."""
    share = metrics.get("train/bounded_fraction", 0.0)
    if share > 0:
        logger.warning(
            "train/bounded_fraction is %.3g: that share of the tokens has a log-ratio beyond "
            "loss_fn.max_log_ratio, or one that overflows, and no gradient by it. Policy and generator, or policy "
            "and old policy, are far apart: look at train/token_mult_prob_error and train/probs_ratio_max, lower "
            "the learning rate or the number of updates a step",
            share,
        )


def is_good_enough(grpo: GrpoConfig, metrics: Mapping[str, float]) -> bool:
    """True if a validation in the metrics reached `grpo.stop_at_validation_threshold`."""
    name, threshold = grpo.stop_at_validation_metric, grpo.stop_at_validation_threshold
    measured = {key.removeprefix("val/"): value for key, value in metrics.items() if key.startswith("val/")}
    if name is None or threshold is None or not measured:
        return False
    if measured.get(f"{name.rpartition('/')[0]}/{NUM_JUDGED}".removeprefix("/")) == 0:
        return False
    if name == "reward" and name not in measured:  # the mean is called accuracy alone while rewards are 0 or 1
        name = "accuracy"
    if name not in measured:
        # Of another environment, or a component that this validation's rewards lack: the next one may have it.
        logger.warning(
            "grpo.stop_at_validation_metric=%s: this validation has no such metric, and the run goes on; it has %s",
            name,
            ", ".join(sorted(measured)),
        )
        return False
    value = for_decisions(f"val/{name}", metrics)
    assert value is not None
    if value >= threshold:
        logger.info("Validation %s of %.4f has reached grpo.stop_at_validation_threshold=%g", name, value, threshold)
    return value >= threshold
