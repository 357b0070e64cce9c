# SPDX-License-Identifier: Apache-2.0
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.schema.algo import GrpoConfig, RewardScalingConfig
from mrl.metrics import metrics_of_updates
from mrl.store.summary import (
    performance_metrics,
    rollout_metrics,
    text_metrics,
    validation_metrics,
    warn_of_bounded_ratios,
)
from mrl.types import Batch, Prompt, Proposals, RolloutGroup, RolloutInfo, TrainSequence, Verdict
from tests.sources import ROOT
from tests.unit.algo import groups
from tests.unit.data.test_planning import QWEN


def group(env_name: str, *verdicts: Verdict, num_turns: int = 1, num_observed: int = 0) -> RolloutGroup:
    prompt = Prompt(env_name, (1, 2), "", "", env_name)
    infos = [
        RolloutInfo(
            f"0/{env_name}/{i}", env_name, i, 1, 2, 10, "stop", None, num_observed=num_observed, num_turns=num_turns
        )
        for i in range(len(verdicts))
    ]
    return RolloutGroup(prompt, tuple(infos), verdicts)


def good(reward: float, flags: tuple[str, ...] = (), **components: float) -> Verdict:
    return Verdict(reward, True, "ok", "", "", components, flags)


GROUPS = [
    group("math", good(1.0), good(0.0), Verdict(0.0, False, "timeout", "", ""), Verdict(0.0, False, "crash", "", "")),
    group(
        "tools",
        good(0.5, ("unknown_tool",), form=1.0, state=0.0),
        good(1.5, form=1.0, state=2.0),
        num_turns=3,
        num_observed=4,
    ),
    group("math", good(1.0), good(1.0)),
]


def test_environments_are_counted_apart():
    metrics = rollout_metrics(GROUPS, GrpoConfig(), seconds=2.0, num_engine_restarts=0)
    assert (metrics["rollout/math/reward"], metrics["rollout/tools/reward"]) == (0.75, 1.0)
    # Rewards 1, 1, 1, 0 and 1.5, 0.5.
    assert (metrics["rollout/math/reward_std"], metrics["rollout/tools/reward_std"]) == (0.1875**0.5, 0.5)
    assert (metrics["rollout/math/failed"], metrics["rollout/math/timeout"], metrics["rollout/math/crash"]) == (2, 1, 1)
    assert (metrics["rollout/tools/reward_form"], metrics["rollout/tools/reward_state"]) == (1.0, 1.0)
    assert (metrics["rollout/tools/unknown_tool"], metrics["rollout/tools/failed"], metrics["rollout/tools/turns"]) == (
        1,
        0,
        3,
    )
    assert metrics["rollout/failed"] == 2
    assert validation_metrics(GROUPS, is_accuracy=True)["val/math/reward"] == 0.75


def test_an_agents_metrics_do_not_take_the_place_of_the_runs():
    verdict = Verdict(0.5, True, "ok", "", "", metrics={"reward": 9.0, "failed": 9.0, "timeout": 9.0, "luck": 0.25})
    metrics = rollout_metrics([group("far", verdict, good(1.5))], GrpoConfig(), seconds=2.0, num_engine_restarts=0)
    assert (metrics["rollout/far/reward"], metrics["rollout/far/failed"], metrics["rollout/far/luck"]) == (
        1.0,
        0,
        0.125,
    )
    assert metrics["rollout/far/own_reward"] == 4.5 and "rollout/far/timeout" not in metrics


def test_rates_are_of_tokens_that_this_attempt_has_generated():
    kept = [replace(GROUPS[0], num_kept_tokens=13), *GROUPS[1:]]
    rates = [
        rollout_metrics(groups, GrpoConfig(), seconds=2.0, num_engine_restarts=0)["rollout/tokens_per_s"]
        for groups in (GROUPS, kept)
    ]
    assert rates == [(6 * 10 + 2 * 6) / 2, (6 * 10 + 2 * 6 - 13) / 2]
    # A step that takes the first groups drew also for others, and what earlier steps drew of these is not its own.
    drawn = rollout_metrics(GROUPS, GrpoConfig(), seconds=2.0, num_engine_restarts=0, num_drawn=30)
    assert drawn["rollout/tokens_per_s"] == 15


def test_an_environment_where_all_failed_has_no_reward_to_show():
    metrics = rollout_metrics(
        [group("math", Verdict(0.0, False, "error", "", ""))], GrpoConfig(), seconds=1.0, num_engine_restarts=0
    )
    assert (metrics["rollout/math/failed"], metrics["rollout/math/num_rollouts"], metrics["rollout/math/error"]) == (
        1,
        1,
        1,
    )
    assert not [name for name in metrics if "reward" in name]


def test_validation_of_several_rollouts_tells_what_the_best_of_them_does():
    failed = Verdict(1.0, False, "timeout", "", "")
    groups = [
        group("math", good(1.0), good(0.0), good(0.0), good(0.0)),
        group("math", good(0.5), good(1.0), failed, failed),
    ]
    metrics = validation_metrics(groups, is_accuracy=False)
    assert metrics["val/accuracy"] == metrics["val/reward"] == metrics["val/math/reward"] == 2.5 / 6
    # One name for a whole run, whatever the rewards of a step.
    for rewards in ((1.0, 0.0), (0.5, 0.0)):
        judged = [group("math", *map(good, rewards), failed)]
        assert "val/reward" not in validation_metrics(judged, is_accuracy=True)
        assert "val/reward" in validation_metrics(judged, is_accuracy=False)
    # One and two of four rollouts have a reward.
    assert metrics["val/pass_at_1"] == (1 / 4 + 2 / 4) / 2
    assert metrics["val/pass_at_2"] == (3 / 6 + 5 / 6) / 2
    assert metrics["val/pass_k"] == 1.0 and "val/pass_at_4" not in metrics
    assert metrics["val/num_samples"] == 8
    assert metrics["val/num_judged"] == metrics["val/math/num_judged"] == 6
    none = validation_metrics([group("math", failed)], is_accuracy=False)
    assert none["val/num_judged"] == 0 and not {"val/accuracy", "val/reward", "val/math/reward"} & set(none)
    assert not [name for name in validation_metrics([group("math", good(1.0))], is_accuracy=True) if "pass" in name]


def test_flagged_rollouts_have_a_reward_and_failed_ones_have_none():
    judged = groups.group([1.0, 0.0, 4.0, 9.0], flagged=[2], invalid=[3])
    metrics = rollout_metrics([judged], GrpoConfig(), seconds=1.0, num_engine_restarts=0)
    assert metrics["train/reward"] == metrics["rollout/math/reward"] == 5 / 3
    assert metrics["rollout/failed"] == 2.0 and metrics["rollout/math/flagged"] == 1.0
    assert (metrics["rollout/num_judged"], metrics["rollout/num_rollouts"]) == (3, 4)
    assert validation_metrics([judged], is_accuracy=True)["val/accuracy"] == 5 / 3


def test_the_reward_is_what_advantages_are_made_of():
    scaled = GrpoConfig(reward_scaling=RewardScalingConfig(enabled=True, target_max=4.0))
    metrics = rollout_metrics([groups.group([1.0, 0.0])], scaled, seconds=1.0, num_engine_restarts=0)
    assert (metrics["train/reward"], metrics["train/reward_max"], metrics["rollout/math/reward"]) == (2.0, 4.0, 0.5)


def test_ratios_that_are_bounded_are_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        warn_of_bounded_ratios({"train/bounded_fraction": 0.0})
        warn_of_bounded_ratios({})
        assert caplog.text == ""
        warn_of_bounded_ratios({"train/bounded_fraction": 0.25})
    assert "train/bounded_fraction is 0.25" in caplog.text and "loss_fn.max_log_ratio" in caplog.text


def test_metrics_of_updates_by_hand():
    updates = [
        {"train/loss": 1.0, "train/num_valid_tokens": 10.0, "train/probs_ratio_min": 1.0, "train/advantages/max": 2.0},
        {"train/loss": 2.0, "train/num_valid_tokens": 30.0, "train/probs_ratio_min": 0.8, "train/advantages/max": 1.5},
    ]
    joined = {
        "train/loss": 1.5,
        "train/num_valid_tokens": 40.0,
        "train/probs_ratio_min": 0.8,
        "train/advantages/max": 2.0,
    }
    assert metrics_of_updates(updates) == joined
    assert metrics_of_updates(updates[:1]) == updates[0]


@pytest.mark.parametrize(
    ("precision", "device", "peak"),
    [
        ("bfloat16", "NVIDIA H200", 989.5),
        ("bfloat16", "NVIDIA GB200", 2450.0),
        ("bfloat16", "", None),
        ("float32", "NVIDIA H200", None),
    ],
)
def test_the_work_of_a_gpu_by_hand(tmp_path: Path, precision: str, device: str, peak: float | None):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    config = load_config("grpo_tiny.yaml", [f"policy.model_name={tmp_path}", f"policy.precision={precision}"])
    infos = [RolloutInfo(str(length), "p", 0, 1, 4, length - 4, "stop", None) for length in (10, 20)]
    batch = Batch(tuple(TrainSequence(info, 0.0, True) for info in infos), (), (), 0, 0, {})
    measured = {"time/train": 0.5, "time/total": 3.0, "train/num_logprob_passes": 1.0, "rollout/tokens_per_s": 40.0}
    found = performance_metrics(config, [batch, batch], measured, device=device)
    # Multiplications of a token in three layers and the output, additions beside them; half of the scores of 4 heads of
    # 6.
    matrices = 3 * (8 * 24 + 2 * 8 * 12 + 24 * 8 + 10 * 8 + 2 * 3 * 8 * 5) + 100 * 8
    forward = sum(2 * matrices * length + 3 * 24 * 2 * length**2 for length in (10, 20, 10, 20))
    tflops = (3 + 1) * forward / 0.5 / 4 / 1e12
    expected = {"train_flops_per_gpu": tflops, "policy_training_tokens_per_sec_per_gpu": 60 / 0.5 / 4}
    expected |= {"tokens_per_sec_per_gpu": 60 / 3.0 / 4, "generation_tokens_per_sec_per_gpu": 40.0}
    expected |= {} if peak is None else {"train_fp_utilization": tflops / peak}
    assert found == pytest.approx({f"performance/{name}": value for name, value in expected.items()})


def test_proposals_are_counted_over_all_rollouts():
    first = group("math", good(1.0), good(0.0))
    first = replace(
        first,
        rollouts=(
            replace(first.rollouts[0], proposals=Proposals(4, 8, 5)),
            replace(first.rollouts[1], proposals=Proposals(1, 2, 0)),
        ),
    )
    metrics = rollout_metrics([first], GrpoConfig(), seconds=1.0, num_engine_restarts=0)
    assert (metrics["rollout/spec_acceptance_rate"], metrics["rollout/spec_acceptance_length"]) == (0.5, 2.0)
    assert "rollout/spec_acceptance_rate" not in rollout_metrics(
        GROUPS, GrpoConfig(), seconds=1.0, num_engine_restarts=0
    )


def test_loops_are_told_from_prose_and_code():
    """Prose and code are pages of this repository; a loop is a sentence, written again and again."""
    manual, code = (ROOT / "docs/reliability.md").read_text(), (ROOT / "mrl/store/summary.py").read_text()
    table = "\n".join(f"{i} * {i} = {i * i}" for i in range(300))
    assert text_metrics([manual, code, table, "So 2 + 2 = 4.", ""])["rollout/repetitive_fraction"] == 0
    looping = manual[:9_000] + "Wait, let me check that again. " * 200
    assert text_metrics([manual, code, looping, "ha" * 400])["rollout/repetitive_fraction"] == 0.5
    assert text_metrics(["abcd", "abа日"])["rollout/non_ascii_fraction"] == pytest.approx(2 / 8)
    assert text_metrics([]) == {}
