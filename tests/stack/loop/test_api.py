# SPDX-License-Identifier: Apache-2.0
"""Parts of `mrl.api` in the live run; tests/learn/test_extend.py runs a whole loop."""

from __future__ import annotations

from mrl.api import Loop
from tests.stack.loop.conftest import LiveRun


def test_engines_sample_prompts_of_ones_choice(live: LiveRun):
    loop = Loop(live.run, live.state)
    prompts, step = [loop.prompts[3], loop.prompts[1]], live.state.step
    first, again, other = (loop.engines.sample(prompts, num_generations=3, draw=draw) for draw in (0, 0, 1))
    assert [group.prompt for group in first] == prompts
    assert [len(group.verdicts) for group in first] == [3, 3]
    texts = [[verdict.text for group in groups for verdict in group.verdicts] for groups in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert live.state.step == step
