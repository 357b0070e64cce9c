# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from mrl.store.evaluations import note_on_rewards, scores_by_environment, table_lines, write_results
from mrl.types import Prompt, RolloutGroup, RolloutInfo, Verdict


def group(name: str, env_name: str, *answers: tuple[str, float, bool]) -> RolloutGroup:
    prompt = Prompt(name, (1, 2), f"question {name}", "4", env_name)
    rollouts = tuple(RolloutInfo(f"0/{name}/{i}", name, i, 1, 2, 3 + i, "stop", None) for i in range(len(answers)))
    verdicts = tuple(
        Verdict(reward, ok, "ok" if ok else "timeout", answer, f"it is {answer}") for answer, reward, ok in answers
    )
    return RolloutGroup(prompt, rollouts, verdicts)


GROUPS = [
    group("a", "math", ("4", 1.0, True), ("4", 1.0, True), ("5", 0.0, True)),
    # What could not be judged is wrong, whatever its reward says; half a point is wrong too.
    group("b", "math", ("4", 1.0, False), ("7", 0.5, True), ("4", 1.0, True)),
    group("c", "code", ("", 0.0, True), ("", 1.0, True), ("", 0.0, True)),
]


def test_scores_by_hand():
    scores = scores_by_environment(GROUPS, k=3)
    assert list(scores) == ["math", "code", "all"]
    assert scores["math"]["pass@1"] == (2 / 3 + 1 / 3) / 2
    assert scores["math"]["pass@3"] == 1.0
    # Of b the first "4" could not be judged, but it is what most say: the vote is wrong.
    assert scores["math"]["cons@3"] == 0.5
    assert (scores["math"]["failed"], scores["math"]["prompts"], scores["math"]["answers"]) == (1.0, 2.0, 6.0)
    assert "cons@3" not in scores["code"]
    assert scores["code"]["pass@1"] == pytest.approx(1 / 3) and scores["code"]["mean_length"] == 4.0
    assert scores["all"]["prompts"] == 3.0
    assert list(scores_by_environment(GROUPS[:2], k=1)) == ["all"]


def test_a_sum_of_components_that_is_1_but_for_its_last_bit_is_right():
    answers = [("4", reward, True) for reward in (0.6 + 0.3 + 0.1, 1.0 + 1e-16, 0.1 * 3 + 0.7, 1.0 - 1e-6, 0.9)]
    assert [scores_by_environment([group("a", "math", answer)], k=1)["all"]["pass@1"] for answer in answers] == [
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]


def test_the_table_begins_with_the_metric_that_was_asked_for():
    lines = table_lines(scores_by_environment(GROUPS, k=3), first="cons@3")
    assert lines[0].split()[:4] == ["environment", "cons@3", "prompts", "answers"]
    assert [line.split()[:2] for line in lines[1:]] == [["math", "0.5000"], ["code", "-"], ["all", "0.3333"]]
    assert len({len(line) for line in lines}) == 1


def test_readers_are_told_what_counts_as_right_where_rewards_are_other_than_0_and_1():
    assert note_on_rewards(GROUPS[2:]) == ""
    assert note_on_rewards([group("b", "math", ("4", 1.0, False), ("7", 0.5, True), ("", -0.25, True))]).startswith(
        "Rewards are between -0.25 and 0.5, and `reward` is their mean; "
    )


def test_results_hold_every_answer(tmp_path: Path):
    path = tmp_path / "new" / "results.json"
    write_results(path, described={"model": "m"}, scores=scores_by_environment(GROUPS, k=1), groups=GROUPS)
    results = json.loads(path.read_text())
    assert results["model"] == "m" and results["scores"]["all"]["prompts"] == 3.0
    assert [prompt["prompt_id"] for prompt in results["prompts"]] == ["a", "b", "c"]
    assert results["prompts"][1]["answers"][0] == {
        "text": "it is 4",
        "extracted": "4",
        "reward": 1.0,
        "status": "timeout",
    }
