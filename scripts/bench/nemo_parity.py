# SPDX-License-Identifier: Apache-2.0
"""Compares mrl's advantages, losses and metrics with NeMo RL's own code: a table, and docs/data/nemo_parity.json.

Usage: python -m scripts.bench.nemo_parity CHECKOUT [--no-record] [--only TEXT]

Every case has 200 random batches. Differences are absolute, relative where NeMo RL's number is above 1. Exit code 1 if a case differs
that is not in the table of deviations of docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor

from mrl.config.schema.algo import GrpoConfig, LossConfig, RewardScalingConfig, RewardShapingConfig
from scripts.bench import nemo_advantages as advantages
from scripts.bench import nemo_critic as critic
from scripts.bench import nemo_distillation as distillation
from scripts.bench import nemo_losses as losses
from scripts.bench.nemo_advantages import Shares
from scripts.bench.nemo_code import STUBBED, NemoRl, load
from tests.long.record import Row, record

NUM_BATCHES = 200
TOLERANCE = 1e-6
Pairs = list[tuple[str, Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """A comparison, from the number of a random batch."""

    name: str
    compare: Callable[[int], Pairs]
    deviation: str | None = None
    """The row of docs/algorithms.md that tells of the difference; None where there must be none."""
    tolerance: float = TOLERANCE


def cases(nemo: NemoRl) -> Iterator[Case]:
    """All of them."""
    yield from advantage_cases(nemo)
    yield from loss_cases(nemo)
    yield from critic_cases(nemo)
    yield from distillation_cases(nemo)


def distillation_cases(nemo: NemoRl) -> Iterator[Case]:
    """The loss of distillation, in float32 on both sides."""

    def case(name: str, suffix: str = "", *, k: int | None = None, num_rows: int = 1, is_parallel: bool = False) -> Case:
        config = distillation.LOSSES[name]

        def compare(seed: int) -> Pairs:
            inputs = distillation.random_inputs(seed, k=k)
            return distillation.compare_distillation(nemo, inputs, config, num_rows=num_rows, is_parallel=is_parallel)

        # Outside the top k a reverse KL is 100 times what is left of a sum of probabilities, rounding included.
        is_rounded = config.zero_outside_topk and config.kl_type != "forward"
        return Case(name + suffix, compare, tolerance=2e-5 if is_rounded else TOLERANCE)

    yield from map(case, distillation.LOSSES)
    for name in ("distillation, mixed", "distillation, mixed, whole vocabulary"):
        # Where a batch has fewer sequences than rows, some row has none.
        yield case(name, "; three rows", num_rows=3)
        yield case(name, "; their parallel code", is_parallel=True)
        yield case(name, "; k = 1", k=1)
        yield case(name, "; k = vocabulary", k=distillation.VOCABULARY)


def critic_cases(nemo: NemoRl) -> Iterator[Case]:
    """Further cases of PPO."""
    for name, config in critic.ESTIMATORS.items():
        # One batch has two tokens whose advantages are 1e-3 apart.
        deviation = "Mean of token advantages" if name == "GAE, lambda 1" else None
        yield Case(name, lambda seed, config=config: critic.compare_gae(nemo, seed, config), deviation)
    gae = critic.ESTIMATORS["GAE"]
    yield Case("GAE, KL in reward", lambda seed: critic.compare_gae(nemo, seed, gae, with_kl=True))
    for name, loss in critic.VALUE_LOSSES.items():
        yield Case(name, lambda seed, loss=loss: critic.compare_value_loss(nemo, seed, loss))


def advantage_cases(nemo: NemoRl) -> Iterator[Case]:
    """Rewards, advantages, and what becomes of them before the loss."""

    def compared(
        name: str, change: Callable[[GrpoConfig], GrpoConfig] = lambda grpo: grpo, loss: LossConfig | None = None, **shares: float
    ) -> Callable[[int], Pairs]:
        grpo, components = change(advantages.ESTIMATORS[name]), 2 if name.startswith("GDPO") else 0
        special = Shares(**shares)
        return lambda seed: advantages.compare_advantages(nemo, advantages.random_batch(seed, special, components=components), grpo, loss)

    for name in advantages.ESTIMATORS:
        yield Case(name, compared(name))
    for name in ("GRPO, leave one out, std", "GDPO, leave one out, std", "REINFORCE++, minus baseline", "On-policy distillation"):
        yield Case(f"{name}; masked rollouts", compared(name, flagged=0.2))
        filtered = compared(name, lambda grpo: replace(grpo, overlong_filtering=True), cut_off=0.2)
        yield Case(f"{name}; overlong filtering", filtered)
    for name in ("GRPO, leave one out, std", "REINFORCE++, minus baseline", "On-policy distillation"):
        yield Case(f"{name}; clipped", compared(name, advantages.bounded))
        both = compared(name, lambda grpo: advantages.fixed(advantages.bounded(grpo)), flawed=0.2)
        yield Case(f"{name}; fixed, then clipped", both)
    kl = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)
    yield Case("REINFORCE++, KL in reward", compared("REINFORCE++, minus baseline", loss=kl, flagged=0.2))
    yield Case("GRPO, leave one out, std; all masked", compared("GRPO, leave one out, std", flagged=1.0))
    grpo = advantages.ESTIMATORS["GRPO, leave one out, std"]
    yield Case(
        "GRPO, leave one out, std; one reward differs, float32",
        lambda seed: advantages.compare_in_float32(nemo, advantages.spike(seed), grpo),
        deviation="Variance of rewards",
    )
    scaled = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=1.0, target_min=0.5, target_max=2.0)
    overlong = RewardShapingConfig(enabled=True, overlong_buffer_length=2, overlong_buffer_penalty=0.7, max_response_length=5)
    stopped = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.3)
    for name, scaling, shaping in (
        ("reward scaling", scaled, RewardShapingConfig()),
        ("overlong penalty", RewardScalingConfig(), overlong),
        ("overlong penalty of scaled rewards", scaled, overlong),
        ("stop-properly penalty", RewardScalingConfig(), stopped),
    ):
        yield Case(
            name,
            lambda seed, scaling=scaling, shaping=shaping: advantages.compare_rewards(
                nemo, advantages.random_batch(seed, Shares(cut_off=0.3)), scaling, shaping
            ),
        )
    yield Case("dynamic sampling, group mean", lambda seed: advantages.compare_signal(nemo, advantages.random_batch(seed)))


def loss_cases(nemo: NemoRl) -> Iterator[Case]:
    """Losses, gradients and metrics."""

    def compared(name: str, inputs: Callable[[int], losses.Inputs], *, but: tuple[str, ...] = ()) -> Callable[[int], Pairs]:
        return lambda seed: losses.compare_losses(nemo, inputs(seed), losses.LOSSES[name], but=but)

    for name, config in losses.LOSSES.items():
        # See the table of deviations.
        but = ("probs_ratio",) if config.disable_ppo_ratio else ()
        but += ("sampling_importance_ratio",) if config.sequence_level_importance_ratios else ()
        yield Case(name, compared(name, losses.random_inputs, but=but))
    for name in ("GRPO clip", "GSPO", "CISPO", "KL k3", "KL k3, on-policy approximation"):
        but = ("js_divergence_error", "sampling_importance_ratio")
        yield Case(f"{name}; log-ratios to 30", compared(name, losses.far_policies, but=but))
    for name in ("importance sampling correction", "correction of sequences", "TIS", "TIS of sequences", "IcePop", "seq-mask-TIS"):
        # Metrics of log-ratios of 1000 are infinite, or their difference is.
        but = ("gen_kl", "policy_kl", "js_", "token_mult", "sampling_importance_ratio", "approx_entropy")
        yield Case(f"{name}; weights that overflow", compared(name, losses.far_inputs, but=but))
    yield Case("GRPO clip; an empty response", compared("GRPO clip", losses.empty_inputs))
    name = "GRPO clip, mean over sequences"
    yield Case(f"{name}; an empty response", compared(name, losses.empty_inputs), "Mean over sequences")
    for threshold in (None, 1.5):
        yield Case(
            f"errors of sequences, threshold {threshold}", lambda seed, threshold=threshold: losses.compare_errors(nemo, seed, threshold)
        )
    for metric, name, deviation in (
        ("probs_ratio", "REINFORCE (disable_ppo_ratio)", "`train/probs_ratio*`"),
        ("sampling_importance_ratio", "correction of sequences", "`train/sampling_importance_ratio`"),
    ):

        def of_metric(seed: int, metric: str = metric, name: str = name) -> Pairs:
            return [pair for pair in compared(name, losses.random_inputs)(seed) if pair[0] == f"metric {metric}"]

        yield Case(f"{name}; {metric}", of_metric, deviation)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, absolute, or relative where theirs is above 1; equal infinities and NaN do not differ."""
    ours, theirs = ours.double(), theirs.double()
    is_equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = ((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).nan_to_num(nan=torch.inf)
    return float(torch.where(is_equal, 0.0, distance).amax()) if ours.numel() else 0.0


def measure(case: Case) -> Row:
    """The row of one case. What differs most stands in its verdict."""
    largest: dict[str, float] = {}
    # Theirs prints what it does.
    with redirect_stdout(StringIO()):
        for seed in range(NUM_BATCHES):
            for name, ours, theirs in case.compare(seed):
                largest[name] = max(largest.get(name, 0.0), difference(ours, theirs))
    gradients = largest.pop("gradient", None)
    values = max(largest.values())
    is_equal = max(values, gradients or 0.0) <= case.tolerance
    worst = max(largest, key=lambda name: largest[name])
    verdict = "equal" if is_equal else f"deviation: {case.deviation}" if case.deviation else f"differs ({worst})"
    return {"case": case.name, "batches": NUM_BATCHES, "values": _short(values), "gradients": _short(gradients), "verdict": verdict}


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}" if value else "0"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a NeMo RL checkout")
    parser.add_argument("--no-record", action="store_true", help="leave docs/data as it is")
    parser.add_argument("--only", default="", help="only cases whose names hold this")
    arguments = parser.parse_args()
    nemo = load(arguments.checkout)
    print(f"NeMo RL {nemo.commit}; stubs for {', '.join(STUBBED)}", flush=True)
    rows = []
    for case in cases(nemo):
        if arguments.only in case.name:
            rows.append(measure(case))
            print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    if not arguments.no_record and not arguments.only:
        record("nemo_parity", rows, command=f"python -m scripts.bench.nemo_parity CHECKOUT (NVIDIA-NeMo/RL {nemo.commit})")
    return int(any(str(row["verdict"]).startswith("differs") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
