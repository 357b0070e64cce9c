# SPDX-License-Identifier: Apache-2.0
"""Steps with lag: a dedicated engine samples later steps' rollouts while the policy trains."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from mrl.cluster.errors import DeadlineExceeded
from mrl.cluster.verbs import PolicyVerbs
from mrl.data.order import PromptOrder
from mrl.data.packing import PackedRow
from mrl.envs.task import Task
from mrl.loop.rollouts import RolloutSupplier
from mrl.loop.run import Run
from mrl.types import Verdict
from tests import models
from tests.drivers import call, do, train_step
from tests.stack.ahead.conftest import running
from tests.stack.loop.conftest import CoinToss
from tests.waiting import HANG_S


def assert_prompts_in_order(run: Run[RolloutSupplier], num_steps: int) -> None:
    """The ledger says that steps 1 to `num_steps` trained on the prompts of a synchronous run."""
    picks = PromptOrder([len(run.supplier.data.train)], seed=run.config.grpo.seed).at(0, 4 * num_steps)
    names = [run.supplier.data.train[index].prompt_id for _, index in picks]
    events = [json.loads(line) for line in run.folder.ledger.path.read_text().splitlines()]
    trained = [[prompt_id for _, prompt_id in event["prompts"]] for event in events if event["event"] == "trained"]
    assert trained == [names[first : first + 4] for first in range(0, len(names), 4)]


Update = list[tuple[PackedRow, torch.Tensor]]
"""The rows of the only rank, each with its old logprobs."""


def kept_updates(run: Run[RolloutSupplier]) -> list[Update]:
    """Inputs of every update from now on; filled in as they come."""
    policies, kept = run.supplier.session.policies, []
    call = policies.call

    def call_and_keep(verb, *arguments, **options):
        if verb is PolicyVerbs.train_step:
            kept.append(policies.apply(batch_of, *arguments, deadline_s=HANG_S)[0])
        return call(verb, *arguments, **options)

    setattr(policies, "call", call_and_keep)  # noqa: B010  a plain assignment is a type error
    return kept


def batch_of(policy, update_index: int) -> Update:
    return [(row, row.old_logprobs_T) for row in policy._batches[update_index].rows]


def drift_from_start(update: Update) -> float:
    """Largest distance of the generator's logprobs from those transformers computes with the model folder's weights."""
    return max(float(drift_T.max()) for drift_T in drifts_from_start(update))


def drifts_from_start(update: Update) -> list[torch.Tensor]:
    """Measures that distance for each generated token, by sequence."""
    model, drifts = models.nemotron_h(), []
    for row, _ in update:
        for start, length in zip(row.cu_seqlens.tolist(), row.lengths, strict=False):
            span = slice(start, start + length)
            with torch.no_grad():
                logprobs_TV = torch.log_softmax(model(row.token_ids_T[None, span]).logits[0], dim=-1)
            found_T = logprobs_TV.gather(1, row.labels_T[span, None])[:, 0]
            drifts.append((found_T - row.generator_logprobs_T[span])[row.generated_mask_T[span] > 0].abs())
    return drifts


def loss_by_hand(update: Update) -> float:
    """Loss of a step's first update, whose ratios are 1: advantages, weighted by the trainer's relative likelihood."""
    gained = sum(
        float((row.loss_mask_T * row.advantages_T * torch.exp(old - row.generator_logprobs_T)).sum())
        for row, old in update
    )
    return -gained / sum(float(row.loss_mask_T.sum()) for row, _ in update)


def test_lag_one(tmp_path: Path):
    with running(tmp_path, "grpo.max_num_steps=3") as (run, state):
        updates = kept_updates(run)
        train_step(run, state)
        assert state.metrics["train/avg_trajectory_age"] == 0
        assert drift_from_start(updates[0]) < 1e-4
        # What was under way had to end before the new weights; the third step's is drawn from them.
        asked = list(run.supplier.queue._asked.values())
        assert len(asked) == 8 and [group.num_missing for group in asked[:4]] == [0] * 4
        assert 0 <= do(run.supplier.validate(state))["val/accuracy"] <= 1
        train_step(run, state)
        assert state.metrics["train/avg_trajectory_age"] == state.metrics["train/max_trajectory_age"] == 1
        # Weights that are a step older give other logprobs than those that train, and the update is by the latter.
        assert 1e-6 < state.metrics["train/mean_abs_dlogp"] < 1
        assert state.metrics["train/probs_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert 0 <= state.metrics["rollout/engine_idle_fraction"] < 1
        assert state.metrics["rollout/mixed_version_fraction"] == 0
        # Transformers finds them drawn from the weights before the first update; the third step's are not.
        assert drift_from_start(updates[1]) < 1e-4
        assert state.metrics["train/loss"] == pytest.approx(loss_by_hand(updates[1]), rel=1e-4, abs=1e-6)
        train_step(run, state)
        assert drift_from_start(updates[2]) > 1e-3
        assert state.metrics["train/loss"] == pytest.approx(loss_by_hand(updates[2]), rel=1e-4, abs=1e-6)
        assert_prompts_in_order(run, 3)
        assert not run.folder.ledger.state.taken


@pytest.mark.long("async")
def test_an_engine_that_dies_while_the_policy_trains_is_replaced_by_the_refit(tmp_path: Path):
    # The second death may come before the new engine has finished a rollout.
    with running(tmp_path, "grpo.async_grpo.max_generation_failures=1") as (run, state):
        engines = run.supplier.session.engines
        train_step(run, state)
        (pid,) = engines.apply(lambda _: os.getpid(), deadline_s=HANG_S)
        kill_during(run, PolicyVerbs.train_step, int(str(pid)))
        train_step(run, state)
        assert engines.book.num_restarts == 1 and not engines.book.lost
        # While the next step waits for its rollouts, another one dies.
        (pid,) = engines.apply(lambda _: os.getpid(), deadline_s=HANG_S)
        os.kill(int(str(pid)), signal.SIGKILL)
        train_step(run, state)
        assert engines.book.num_restarts == 2 and state.metrics["train/max_trajectory_age"] <= 1
        train_step(run, state)
        assert_prompts_in_order(run, 4)


class Silent(CoinToss):
    """An environment that answers no more."""

    async def judge(self, task: Task) -> Verdict:
        await asyncio.Event().wait()
        return await super().judge(task)


def fall_silent(actor) -> None:
    actor.scorer.environments["math"] = Silent()


@pytest.mark.long("async")
def test_a_silent_environment_is_not_waited_for_forever_when_an_engine_is_lost(tmp_path: Path):
    keys = ["grpo.max_rollout_turns=2", "deadlines.generate_s=20"]
    with running(tmp_path, *keys) as (run, state):
        source, engines, sampling = (
            run.supplier.session.collector,
            run.supplier.session.engines,
            run.supplier.queue._sampling,
        )
        do(source.drain())
        run.supplier.session.rewards.apply(fall_silent)
        for index, max_new_tokens in ((0, 1), (1, 1200)):
            asked = [(-2, run.supplier.data.train[index])]
            wanted = dataclasses.replace(sampling, max_new_tokens=max_new_tokens, stop_token_ids=())
            call(partial(source.ask, num_generations=4, weight_version=state.weight_version), asked, wanted)
        (pid,) = engines.apply(lambda _: os.getpid(), deadline_s=HANG_S)
        do(source.wait(lambda: run.supplier.session.rewards.num_undecided >= 4))
        os.kill(int(str(pid)), signal.SIGKILL)
        with pytest.raises(DeadlineExceeded, match="turns wait for their environment"):
            do(source.drain())
        assert engines.book.lost == {0}


@pytest.mark.long("async")
@pytest.mark.parametrize("recomputes", ["true", "false"])
def test_rollouts_go_on_with_new_weights(tmp_path: Path, recomputes: str):
    keys = [
        "grpo.async_grpo.in_flight_weight_updates=true",
        f"grpo.async_grpo.recompute_kv_cache_after_weight_updates={recomputes}",
        "grpo.async_grpo.sample_freshest_first=true",
        "policy.generation.max_new_tokens=400",
        "grpo.max_num_steps=6",
    ]
    with running(tmp_path, *keys) as (run, state):
        mixed = 0.0
        for _ in range(6):
            train_step(run, state)
            assert "refit/drain_seconds" not in state.metrics
            assert state.metrics["train/max_trajectory_age"] <= 1
            assert 0 <= state.metrics["train/mean_abs_dlogp"] < 1
            mixed += state.metrics["rollout/mixed_version_fraction"]
        assert mixed > 0
        trained = [key for keys in run.folder.ledger.state.trained.values() for key in keys]
        assert len(set(trained)) == 24


def test_the_first_groups_are_trained_and_the_others_go_on_with_new_weights(tmp_path: Path):
    keys = [
        "policy.generation.colocated.enabled=true",
        "grpo.async_grpo.enabled=false",
        "grpo.oversample=2",
        "policy.generation.max_new_tokens=1200",
    ]
    with running(tmp_path, *keys) as (run, state):
        updates, under_way, left = kept_updates(run), set[str](), 0.0
        for _ in range(4):
            train_step(run, state)
            assert state.metrics["train/max_trajectory_age"] <= 1
            left += state.metrics["rollout/unfinished_groups"]
            # None is asked for again: those under way are the engine's.
            under_way |= {request.request_id for request in run.supplier.session.engines.book.unanswered()}
        assert left > 0 and under_way
        # The last steps ask for no more than they train.
        assert not run.supplier.queue._asked and not run.folder.ledger.state.taken
        trained = [key for keys in run.folder.ledger.state.trained.values() for key in keys]
        assert len(trained) == len(set(trained)) == 16
        assert drift_from_start(updates[0]) < 1e-4
        # Transformers finds the beginnings of some drawn from the weights before the first update, and the rest not.
        went_on = [drift_T for drift_T in drifts_from_start(updates[1]) if drift_T[0] < 1e-4 and drift_T.max() > 1e-3]
        assert went_on
        for drift_T in went_on:
            num_old = int((drift_T < 1e-4).cumprod(0).sum())
            assert (drift_T[num_old:] < 1e-4).float().mean() < 0.5


def kill_during(run: Run[RolloutSupplier], fatal: Callable, pid: int) -> None:
    """Kills a process when the ranks are next asked for `fatal`."""
    policies = run.supplier.session.policies
    call = policies.call

    def call_and_kill(verb, *arguments, **options):
        if verb is fatal:
            setattr(policies, "call", call)  # noqa: B010  a plain assignment is a type error
            os.kill(pid, signal.SIGKILL)
        return call(verb, *arguments, **options)

    setattr(policies, "call", call_and_kill)  # noqa: B010  a plain assignment is a type error
