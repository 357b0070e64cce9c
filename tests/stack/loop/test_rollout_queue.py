# SPDX-License-Identifier: Apache-2.0
"""Supply of a step and of a validation, by the real engines."""

from __future__ import annotations

import dataclasses
import json

from mrl.config.schema.run import RunConfig
from mrl.loop.queue import RolloutQueue, open_queue
from tests.drivers import do, train_step
from tests.stack.loop.conftest import LiveRun


def with_grpo(live: LiveRun, **keys: int | bool) -> RunConfig:
    return dataclasses.replace(live.config, grpo=dataclasses.replace(live.config.grpo, **keys))


def with_keys(live: LiveRun, **keys: int | bool) -> RolloutQueue:
    """A queue of the same run by a config with other keys of section grpo."""
    run = live.run
    return open_queue(
        with_grpo(live, **keys),
        run.supplier.data,
        run.supplier.session.collector,
        run.folder.ledger,
        last_step=run.last_step,
    )


def test_dynamic_sampling_trains_on_groups_whose_rewards_differ(live: LiveRun):
    run, kept = live.run, live.run.supplier.queue
    run.supplier.queue = with_keys(live, use_dynamic_sampling=True, num_generations_per_prompt=2)
    run.supplier.config = with_grpo(live, use_dynamic_sampling=True)
    # Two tosses are equal every other time.
    for _ in range(2):
        train_step(run, live.state)
        metrics, step = live.state.metrics, live.state.step
        dropped = run.folder.ledger.state.dropped.get(step, ())
        assert len(run.folder.ledger.state.trained[step]) == 4
        # Each of the groups has one reward of 0 and one of 1.
        assert metrics["train/filtered_reward"] == 0.5
        num_batches = metrics["train/dynamic_sampling_num_gen_batches"]
        num_surplus = metrics["train/dynamic_sampling_num_discarded_valid_samples"] / 2
        assert len(dropped) + 4 + num_surplus == 4 * num_batches
        assert metrics["rollout/groups_without_signal"] == len(dropped)
        assert metrics["train/max_trajectory_age"] == 0
    rows = [json.loads(line) for line in (run.folder.path / "metrics.jsonl").read_text().splitlines()]
    assert "train/filtered_reward" in rows[-1]
    # What was left over is still taken; the other queue begins behind it.
    run.folder.ledger.roll_back(live.state.step)
    run.supplier.queue, run.supplier.config = with_keys(live), live.config
    assert kept is not run.supplier.queue


def test_validation_draws_as_its_own_keys_say(live: LiveRun):
    run, config = live.run, live.config
    generation = dataclasses.replace(config.policy.generation, val_temperature=0.0)
    policy = dataclasses.replace(config.policy, generation=generation)
    grpo = dataclasses.replace(config.grpo, val_num_generations_per_prompt=3)
    run.supplier.config = dataclasses.replace(config, policy=policy, grpo=grpo)
    metrics = do(run.supplier.validate(live.state))
    run.supplier.config = config
    assert metrics["val/num_samples"] == 3 * 8
    # The likeliest tokens are the same in every rollout of a prompt, and so is the reward that follows from the text.
    assert metrics["val/accuracy"] == metrics["val/pass_at_1"] == metrics["val/pass_at_2"] == metrics["val/pass_k"]
    samples = [json.loads(line) for line in (run.folder.path / "samples.jsonl").read_text().splitlines()]
    assert samples[-1]["split"] == "validation"
    again = do(run.supplier.validate(live.state))
    assert again["val/num_samples"] == 8 and "val/pass_k" not in again
