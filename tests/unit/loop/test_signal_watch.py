# SPDX-License-Identifier: Apache-2.0
import json
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from mrl.algo.advantages import train_sequences
from mrl.config.schema.algo import GrpoConfig
from mrl.envs.child import traced
from mrl.loop.signal_watch import NUM_EQUAL_STEPS, MaskTally, SignalWatch, reason_of_masks, reasons_of
from mrl.store.summary import rollout_metrics
from mrl.types import RolloutGroup, Verdict
from tests.unit.algo.groups import group

CONFIG = GrpoConfig(num_prompts_per_step=2, num_generations_per_prompt=2)
EQUAL = [group([0.0, 0.0], name="a"), group([0.0, 0.0], name="b")]
MASKED = [group([0.0, 0.0], name="a", invalid=[0, 1])]
APART = [group([0.0, 0.0], name="a"), group([1.0, 1.0], name="b")]


def note(watch: SignalWatch, step: int, groups: list[RolloutGroup]) -> str | None:
    return watch.note(step, groups, train_sequences(groups, CONFIG)[0])


def test_several_steps_of_equal_rewards_are_said(caplog: pytest.LogCaptureFixture):
    watch = SignalWatch(None)
    with caplog.at_level(logging.WARNING):
        assert note(watch, 1, APART) is None and caplog.messages == []
        assert note(watch, 2, MASKED) is None and caplog.messages == []
        assert note(watch, 3, APART) is None
        for step in range(4, 4 + NUM_EQUAL_STEPS):
            assert caplog.messages == []
            assert note(watch, step, EQUAL) is None
        (said,) = caplog.messages
    assert said.startswith("No signal in step 6: all 4 rewards are 0; steps in a row without a signal: 3.")


def test_a_step_of_groups_that_differ_has_a_signal_though_its_groups_have_none():
    metrics = rollout_metrics(APART, CONFIG, seconds=1.0, num_engine_restarts=0)
    assert metrics["rollout/groups_without_signal"] == 2
    watch = SignalWatch(1)
    assert note(watch, 1, APART) is None and watch.num_steps == 0
    assert "grpo.max_steps_without_signal=1 ends the run" in (note(watch, 2, EQUAL) or "")


HALF = [group([0.0, 0.0, 0.0, 0.0], name="a", invalid=[0, 1]), group([0.0, 0.0], name="b", flagged=[0])]


def test_masked_rollouts_are_said_with_their_share(caplog: pytest.LogCaptureFixture):
    said = "2 of 6 rollouts (33.3%) are masked, and not trained on; 2 because of: error"
    tally = MaskTally()
    assert tally.text() == "" and tally.count(APART).text() == ""
    assert tally.count(HALF).count(HALF).text() == said.replace("2 of 6", "4 of 16").replace("33.3", "25.0").replace(
        "; 2", "; 4"
    )
    assert tally.by_kind() == {}
    for index, reason in enumerate(["ValueError: b", "ValueError: a", "ValueError: b"]):
        told = replace(HALF[0].verdicts[0], reason=reason, status="error" if index else "timeout")
        tally.count([replace(HALF[0], verdicts=(told,))])
    tally.count([replace(HALF[0], verdicts=(told,))])
    assert tally.by_kind() == {"error": "ValueError: b; ValueError: a", "timeout": "ValueError: b"}
    watch = SignalWatch(None)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 1 + NUM_EQUAL_STEPS):
            note(watch, step, HALF)
    assert f"all 3 rewards are 0, and {said}; steps in a row" in caplog.text


def test_failures_at_one_line_are_one_kind_whatever_they_say_of_the_row():
    """Nine rows fail at a line of the user's, each with its own text; two at another line, two with another error."""
    verdicts = [
        raised(function, f'row {number}\nof two lines\n  File "row.py", line {number}')
        for number in range(9)
        for function in (key_error, *([deep, value_error] if number < 2 else []))
    ]
    tally = MaskTally().count([replace(HALF[0], verdicts=tuple(verdicts))])
    assert sorted(tally.kinds.values()) == [2, 2, 9]
    assert "; 9 because of: KeyError: " in tally.text() and f"({__file__}:" in tally.by_kind()["error"]
    assert reasons_of([replace(HALF[0], verdicts=tuple(verdicts))]).most_common(1)[0][1] == 9


def key_error(text: str) -> None:
    {}[text]


def value_error(text: str) -> None:
    raise ValueError(text)


def deep(text: str) -> None:
    """Raises in a library, at a line that depends on the text."""
    json.loads("[" if text.startswith("row 0") else "{}{}")


def raised(function: Callable[[str], None], text: str) -> Verdict:
    try:
        function(text)
    except Exception as error:
        place, trace = traced(error)
        return replace(
            HALF[0].verdicts[0], reason=f"{type(error).__name__}: {error}{place}", status="error", trace=trace
        )
    raise AssertionError


def test_a_key_ends_the_run_after_some_in_a_row():
    watch = SignalWatch(2)
    assert [note(watch, step, groups) is None for step, groups in enumerate((EQUAL, APART, MASKED), 1)] == [True] * 3
    problem = note(watch, 4, EQUAL)
    assert (
        problem is not None and "in a row without a signal: 2. grpo.max_steps_without_signal=2 ends the run" in problem
    )


def test_the_reason_of_a_step_in_which_nothing_counts_comes_with_its_count():
    def reason(groups: list[RolloutGroup], config: GrpoConfig = CONFIG, **metrics: float) -> str | None:
        return reason_of_masks(
            groups, train_sequences(groups, config)[0], {f"train/{k}": v for k, v in metrics.items()}, config
        )

    assert reason([*MASKED, *MASKED]) == "none of its 4 rollouts counts; 4 because of: error"
    assert reason([*MASKED, group([0.0, 1.0], name="b", invalid=[0])]) is None
    cut_off = [group([0.0, 1.0], cut_off=[0, 1])]
    assert reason(cut_off, num_valid_tokens=8.0) is None
    filtering = GrpoConfig(overlong_filtering=True)
    assert reason(cut_off, filtering) == "none of its 2 rollouts counts; 2 because of: grpo.overlong_filtering"
    # What ranks mask is known by their metrics alone.
    far = GrpoConfig(seq_logprob_error_threshold=2.0)
    masked_by_ranks = {"num_valid_tokens": 0.0, "num_masked_seqs_by_logprob_error": 2.0}
    assert (
        reason(EQUAL, far, **masked_by_ranks)
        == "none of its 4 rollouts counts; 2 because of: grpo.seq_logprob_error_threshold=2"
    )
