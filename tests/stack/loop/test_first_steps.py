# SPDX-License-Identifier: Apache-2.0
"""Steps of the real loop: what they measure, and what they leave behind."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.cluster.rewards import Judge
from mrl.config.load import load_config
from mrl.config.schema.algo import PenaltyTokenIdsConfig, RewardPenaltiesConfig
from mrl.config.schema.run import ProfilerConfig, RunConfig
from mrl.envs.inspection import rules_of
from mrl.loop.rollouts import prepare
from tests.drivers import train_step
from tests.stack.loop.conftest import SMALL, LiveRun, write_inputs


def set_rules(judge: Judge, config: RunConfig) -> None:
    judge.rules = rules_of(config, judge.decode, judge.format.tokenizer.all_special_tokens)


def test_on_policy_first_step(live: LiveRun):
    train_step(live.run, live.state)
    metrics = live.state.metrics
    for name in ("train/probs_ratio", "train/probs_ratio_min", "train/probs_ratio_max"):
        assert metrics[name] == pytest.approx(1.0, abs=1e-5), name
    # The reference is the starting model, which these are the weights of.
    assert abs(metrics["train/kl_penalty"]) < 1e-9
    assert metrics["train/token_mult_prob_error"] <= 1.001
    assert metrics["train/mean_abs_dlogp"] < 1e-5
    assert metrics["rollout/failed"] == 0
    # No sequence of a fresh policy is far from what the engine said of it, and none is masked by default.
    assert 1.0 <= metrics["train/min_seq_mult_prob_error"] <= metrics["train/max_seq_mult_prob_error"] <= 1.001
    assert metrics["train/num_masked_seqs_by_logprob_error"] == 0.0
    assert metrics["train/advantages/min"] <= 0.0 <= metrics["train/advantages/max"]
    assert metrics["train/num_logprob_passes"] == 2.0


def test_learning_rates_are_scheduled_over_the_steps_that_the_data_give(tmp_path: Path):
    """Counts as NeMo RL does: 64 rows in three epochs, four prompts a step, fewer than the config allows."""
    training = prepare(load_config("grpo_tiny.yaml", [*write_inputs(tmp_path), *SMALL, "grpo.max_num_epochs=3"]))
    assert training.num_steps == 48 == training.config.num_scheduled_steps_of("policy")


def test_a_second_step_has_moved_away_from_the_reference(live: LiveRun):
    train_step(live.run, live.state)
    assert live.state.metrics["train/kl_penalty"] > 1e-9
    assert live.state.metrics["train/token_mult_prob_error"] <= 1.001


def test_every_step_is_one_line_of_metrics_and_two_of_ledger(live: LiveRun):
    train_step(live.run, live.state)
    folder = live.run.folder
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, live.state.step + 1))
    for name in ("train/reward", "train/loss", "train/grad_norm", "train/gen_kl_error", "time/total", "refit/seconds"):
        assert rows[-1][name] is not None, name
    events = [json.loads(line) for line in (folder.path / "ledger.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["taken", "trained"] * live.state.step
    folder.finish_texts()
    texts = gzip.decompress((folder.log_folder / f"train_data_step{live.state.step}.jsonl.gz").read_bytes())
    data = [json.loads(line) for line in texts.splitlines()]
    assert len(data) == 16 and sum(row["rewards"] for row in data) / 16 == pytest.approx(rows[-1]["train/reward"])


def test_unwanted_tokens_cost_the_reward(live: LiveRun):
    unwanted = PenaltyTokenIdsConfig(unwanted=list(range(64)))
    penalties = RewardPenaltiesConfig(penalize_unwanted_tokens=True, token_ids=unwanted)
    live.run.supplier.session.rewards.apply(set_rules, replace(live.config, reward_penalties=penalties))
    train_step(live.run, live.state)
    live.run.supplier.session.rewards.apply(set_rules, live.config)
    metrics = live.state.metrics
    num_penalised = metrics["rollout/math/unwanted_token"]
    assert 0 < num_penalised <= live.config.grpo.num_rollouts_per_step
    assert metrics["train/reward"] <= 1 - num_penalised / live.config.grpo.num_rollouts_per_step


def test_payload_does_not_pass_through_the_driver(live: LiveRun, monkeypatch: pytest.MonkeyPatch):
    from mrl.cluster import payload
    from mrl.types import Rollout

    def unpickled(*_: object) -> None:
        raise AssertionError("a rollout's payload arrived in the driver")

    monkeypatch.setattr(payload, "pull", unpickled)
    monkeypatch.setattr(Rollout, "__setstate__", unpickled, raising=False)
    train_step(live.run, live.state)


def test_chosen_ranks_record_chosen_steps(live: LiveRun):
    step, config = live.state.step + 2, live.run.config
    config.profiler = ProfilerConfig(steps=[step], ranks=[1])
    for _ in range(3):
        train_step(live.run, live.state)
    config.profiler = ProfilerConfig()
    (trace,) = (live.run.folder.log_folder / "profile").iterdir()
    assert trace.name == f"step{step}_rank1.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    # The verbs of the driver, and the operations of a backward pass and of an optimizer below them.
    assert names.count("train_step") == 1 and names.count("compute_old_logprobs") == 1
    assert "aten::mm" in names and any("autograd::engine" in str(name) for name in names)
    assert any("Optimizer.step" in str(name) for name in names)
