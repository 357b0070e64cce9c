# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from mrl.envs.mcqa import score
from mrl.envs.task import Task

OPTIONS = [{"A": "one", "B": None}, {"A": None, "B": "two"}, {"C": "three"}]


def row(**fields: object) -> str:
    return json.dumps({"options": OPTIONS, "expected_answer": "B", **fields})


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("so \\boxed{B}", "B"),
        ("\\boxed{A} no, \\boxed{ b }", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{(B)}", "B"),
        ("\\boxed{B.}", "B"),
        ("Answer: B", "B"),
        ("the answer is (C)", "C"),
        ("**Answer:** A", "A"),
        ("answer: A. Answer: B", "B"),
        ("<think>\\boxed{B}</think>\\boxed{A}", "A"),
        ("\\boxed{E}", ""),  # no such option
        ("B", ""),
        ("Answer: Both", ""),
        ("", ""),
    ],
)
def test_the_choice(text: str, choice: str):
    outcome = score(Task((text,), row=row()))
    assert (outcome.extracted, outcome.reward) == (choice, float(choice == "B"))


@pytest.mark.parametrize("regex", [r"Option Selected:\s*([A-D])", [r"no (match)", r"Option Selected:\s*([A-D])"]])
def test_the_row_s_own_pattern_comes_first_and_its_last_match_counts(regex: object):
    fields = row(template_metadata={"output_regex": regex})
    assert score(Task(("Option Selected: A. Option Selected: B. \\boxed{A}",), row=fields)).reward == 1.0
    # Without a match the strict form is left, and nothing weaker.
    assert score(Task(("\\boxed{B}",), row=fields)).reward == 1.0
    assert score(Task(("Answer: B",), row=fields)).reward == 0.0


def test_the_answer_of_a_plain_row():
    assert score(Task(("\\boxed{D}",), expected="d")).reward == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"expected_answer": "D"}, "none of the options A, B, C"), ({"template_metadata": {"output_regex": "("}}, "regular")],
)
def test_a_row_that_nobody_can_answer_is_an_error(fields: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        score(Task(("\\boxed{B}",), row=row(**fields)))
