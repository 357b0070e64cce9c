# SPDX-License-Identifier: Apache-2.0
"""Agents with rollouts ahead: lag, weights changing between turns, dynamic sampling, penalties, routes, validation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mrl.cluster.payload import pull
from mrl.data.order import PromptOrder
from mrl.loop.rollouts import RolloutSupplier
from mrl.loop.run import Run
from mrl.types import Rollout, RolloutGroup, RunState
from tests import models, routes
from tests.drivers import do, train_step
from tests.stack.ahead.conftest import running
from tests.waiting import HANG_S

pytestmark = pytest.mark.long("async")

UNWANTED = list(range(0, 256, 40))
SETTINGS = [
    "++env.own.agents.patient=tests.stack.loop.trial_agents:patient",
    "data.default.env_name=patient",
    "policy.generation.vllm_cfg.expose_http_server=true",
    "policy.generation.vllm_cfg.http_server_share=1.0",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "grpo.num_prompts_per_step=2",
    "grpo.use_dynamic_sampling=true",
    "grpo.max_val_samples=2",
    "grpo.max_num_steps=20",
    (
        "grpo.reward_shaping={enabled: true, overlong_buffer_length: 1, overlong_buffer_penalty: 0.01, "
        "max_response_length: 10}"
    ),
    "grpo.overlong_filtering=true",
    "reward_penalties.penalize_unwanted_tokens=true",
    f"reward_penalties.token_ids.unwanted={UNWANTED}",
    "policy.router_replay.enabled=true",
]


def payloads(groups: list[RolloutGroup]) -> list[list[list[Rollout]]]:
    """The sequences of each rollout of each group."""
    return [[pull(rollout.sequences, timeout_s=HANG_S) for rollout in group.rollouts] for group in groups]


def taken_groups(run: Run[RolloutSupplier]) -> list[list[RolloutGroup]]:
    """The groups of every step from now on; filled in as they come."""
    kept, sample = list[list[RolloutGroup]](), run.supplier.sample

    async def noted(state, step) -> list[RolloutGroup]:
        kept.append(await sample(state, step))
        return kept[-1]

    setattr(run.supplier, "sample", noted)  # noqa: B010  a plain assignment is a type error
    return kept


def test_agents_are_asked_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIAL_FOLDER", str(tmp_path))
    free, lonely = tmp_path / "free", tmp_path / "lonely"
    for file in (free, lonely):
        file.touch()
    with running(tmp_path, *SETTINGS) as (run, state):
        train, taken = run.supplier.data.train, taken_groups(run)
        picks = PromptOrder([len(train)], seed=run.config.grpo.seed).at(0, 6)
        prompts = [train[index] for _, index in picks]
        lonely.write_text(prompts[0].text)
        # The last two wait after their first turn until the weights are others.
        free.write_text("\n".join(prompt.text for prompt in prompts[:4]))
        train_step(run, state)
        # A group without a signal is left out, and counted; the next ones take its place, and one is left over.
        assert [group.prompt for group in taken[0]] == prompts[1:3]
        assert (
            state.metrics["rollout/dropped_agent_groups"] == 1
            and state.metrics["train/dynamic_sampling_num_gen_batches"] == 2
        )
        assert state.metrics["train/max_trajectory_age"] == 0 and state.metrics["train/token_mult_prob_error"] <= 1.001
        first = payloads(taken[0])
        assert_penalties(taken[0], first)
        # Whoever asks for few tokens is not cut off, and nothing is filtered.
        assert state.metrics["rollout/truncated_fraction"] == state.metrics["train/num_overlong_filtered"] == 0
        assert state.metrics["train/filtered_reward"] == pytest.approx(mean_shaped_reward(taken[0], first), rel=1e-6)
        # Branches of one answer too: routes are those of the weights in the model folder.
        sequences = [rollout for group in first for sequences in group for rollout in sequences]
        assert len(sequences) == 2 * 4 * 2
        routes.assert_own_routes(
            models.nemotron_h(), dict(zip(map(str, range(16)), sequences, strict=True)), more_than=300
        )
        assert state.metrics["train/router_mismatch"] <= 0.02

        free.write_text("*")
        train_step(run, state)
        assert [group.prompt for group in taken[1]] == prompts[3:5]
        assert_ages(taken[1], payloads(taken[1]), weight_version=state.weight_version - 1)
        assert state.metrics["train/max_trajectory_age"] == state.metrics["train/avg_trajectory_age"] == 1
        # Those that waited have turns of both weights.
        assert state.metrics["rollout/mixed_version_fraction"] == 0.5
        measured = do(run.supplier.validate(state))
        assert measured["val/num_samples"] == 2 and measured["val/accuracy"] == pytest.approx(
            measured["val/patient/reward"]
        )
        assert measured["val/patient/turns"] == 3 and measured["val/mean_length"] > 2
        train_step(run, state)
        events = [json.loads(line) for line in run.folder.ledger.path.read_text().splitlines()]
        trained = [prompt_id for event in events if event["event"] == "trained" for _, prompt_id in event["prompts"]]
        assert trained[:4] == [prompt.prompt_id for prompt in prompts[1:5]] and len(set(trained)) == 6
        assert_too_old_groups_are_asked_again(run, state, taken, tmp_path)


def assert_too_old_groups_are_asked_again(
    run: Run[RolloutSupplier], state: RunState, taken: list[list[RolloutGroup]], folder: Path
) -> None:
    """A group that ends two weights after it was asked for, while steps go on without it."""
    train, ledger, queue = run.supplier.data.train, run.folder.ledger, run.supplier.queue
    queue.plan = dataclasses.replace(queue.plan, freshest_first=True)
    picks = PromptOrder([len(train)], seed=run.config.grpo.seed).at(0, len(train))
    known = {*ledger.state.taken, *ledger.state.consumed}
    held = next(train[index] for _, index in picks if (0, train[index].prompt_id) not in known)
    (folder / "free").write_text(
        "\n".join(prompt.text for prompt in map(train.__getitem__, range(len(train))) if prompt != held)
    )
    while held.prompt_id not in {asked.prompt.prompt_id for asked in queue._asked.values()}:
        train_step(run, state)
    asked_of = state.weight_version
    for _ in range(2):
        train_step(run, state)
    (folder / "free").write_text("*")
    num_again = 0.0
    while held not in [group.prompt for group in taken[-1]]:
        train_step(run, state)
        num_again += state.metrics["rollout/regenerated_groups"]
        assert state.metrics["train/max_trajectory_age"] <= 1
    (group,) = [group for group in taken[-1] if group.prompt == held]
    (sampled,) = payloads([group])
    versions = {turn.weight_version for sequences in sampled for rollout in sequences for turn in rollout.turns}
    assert num_again >= 1 and min(versions) >= state.weight_version - 2 and min(versions) > asked_of + 1
    # Four rollouts were asked for twice.
    assert [line.partition(" ")[2] for line in (folder / "waiting").read_text().splitlines()].count(
        held.text
    ) == 2 * len(sampled)


def assert_penalties(groups: list[RolloutGroup], sampled: list[list[list[Rollout]]]) -> None:
    found = []
    for group, rollouts in zip(groups, sampled, strict=True):
        for verdict, sequences in zip(group.verdicts, rollouts, strict=True):
            spans = [rollout.token_ids[turn.start : turn.stop] for rollout in sequences for turn in rollout.turns]
            found.append(bool(np.isin(np.concatenate(spans), UNWANTED).any()))
            assert (verdict.reward == 0) == ("unwanted_token" in verdict.flags) == found[-1]
    assert {True, False} == set(found)


def mean_shaped_reward(groups: list[RolloutGroup], sampled: list[list[list[Rollout]]]) -> float:
    """Mean by hand: 0.01 less for each token beyond the ninth, of all turns of all sequences."""
    shaped = []
    for group, rollouts in zip(groups, sampled, strict=True):
        for verdict, sequences in zip(group.verdicts, rollouts, strict=True):
            length = sum(turn.stop - turn.start for rollout in sequences for turn in rollout.turns)
            shaped.append(verdict.reward - 0.01 * max(0, length - 9))
    return float(np.mean(shaped))


def assert_ages(groups: list[RolloutGroup], sampled: list[list[list[Rollout]]], *, weight_version: int) -> None:
    """A rollout is as old as its oldest turn, whichever sequence has it."""
    for group, rollouts in zip(groups, sampled, strict=True):
        for info, sequences in zip(group.rollouts, rollouts, strict=True):
            versions = {turn.weight_version for rollout in sequences for turn in rollout.turns}
            assert info.weight_version == min(versions) == weight_version - 1
            assert (info.num_weight_versions > 1) == (len(versions) > 1)
