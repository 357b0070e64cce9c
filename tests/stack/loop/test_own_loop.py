# SPDX-License-Identifier: Apache-2.0
"""Parts of `mrl.api` in the live run; tests/learn/test_extend.py runs a whole loop."""

from __future__ import annotations

import json

import pytest

from mrl.api import Loop
from tests.drivers import do
from tests.examples import run_examples
from tests.stack.loop.conftest import LiveRun


def test_engines_sample_prompts_of_ones_choice(live: LiveRun):
    loop = Loop(live.run, live.state)
    prompts, step = [loop.prompts[3], loop.prompts[1]], live.state.step
    first, again, other = (do(loop.engines.sample(prompts, num_generations=3, draw=draw)) for draw in (0, 0, 1))
    assert [group.prompt for group in first] == prompts
    assert [len(group.verdicts) for group in first] == [3, 3]
    texts = [[verdict.text for group in groups for verdict in group.verdicts] for groups in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert live.state.step == step


def test_the_example_of_a_loop_is_true(live: LiveRun):
    loop = Loop(live.run, live.state)
    num_groups = live.run.config.grpo.num_prompts_per_step
    assert num_groups == 4 and run_examples(Loop.__doc__ or "", {"loop": loop}, do) == 7


def test_a_step_is_that_of_mrls_own_loop(live: LiveRun, caplog: pytest.LogCaptureFixture):
    loop, step = Loop(live.run, live.state), live.state.step
    with pytest.raises(RuntimeError, match=r"no step is under way: loop\.rollouts\.take\(\) begins one"):
        do(loop.refit.run())
    groups = do(loop.rollouts.take())
    with pytest.raises(RuntimeError, match=r"a step is under way: call loop\.refit\.run\(\)"):
        do(loop.rollouts.take())
    assert do(loop.engines.sample(loop.prompts[:1], num_generations=1))
    sequences = loop.rollouts.sequences(groups)
    losses = [do(loop.policy.train(sequences))["train/loss"] for _ in range(2)]
    assert losses[0] != losses[1], "trained twice"
    for name, call in {
        "policy.save": loop.policy.save,
        "rollouts.validate": loop.rollouts.validate,
        "engines.sample": lambda: loop.engines.sample(loop.prompts[:1], num_generations=1),
    }.items():
        with pytest.raises(RuntimeError, match=f"{name} comes before policy.train, or after refit.run"):
            do(call())
    with caplog.at_level("INFO"):
        metrics = do(loop.refit.run({"train/of_ones_own": 7.0}))
    assert live.state.step == step + 1 and live.run.folder.ledger.state.trained[step + 1] == tuple(
        group.rollouts[0].key for group in groups
    )
    assert f" Step {step + 1}/{loop.last_step} " in caplog.text and "[Mrl] " in caplog.text
    assert metrics.items() >= {"train/of_ones_own": 7.0, "train/loss": losses[1]}.items()
    logged = json.loads((live.run.folder.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert logged.items() >= metrics.items() and logged["performance/tokens_per_sec_per_gpu"] > 0
