# SPDX-License-Identifier: Apache-2.0

import pytest

from mrl.envs.math_value import expected_number, score
from tests.answers import Case, cases

CASES = list(cases())


def verdicts(kind: str) -> dict[Case, bool]:
    return {case: score(case.text, case.expected, is_strict=True)[0] == 1.0 for case in CASES if case.kind == kind}


@pytest.mark.parametrize("kind", sorted({case.kind for case in CASES}))
def test_right_forms_are_right_and_restated_questions_are_wrong(kind: str):
    found = verdicts(kind)
    assert [case for case, is_right in found.items() if is_right != (case.is_right != case.is_mistaken)] == []


def test_the_table_is_large_and_no_answer_stands_on_both_sides():
    right, wrong = (
        {(case.expected, case.text) for case in CASES if case.is_right == is_right} for is_right in (True, False)
    )
    assert len(right) >= 200 and len(wrong) >= 200 and not right & wrong


def test_of_plain_numbers_no_wrong_one_is_taken_and_one_right_one_of_fifty_is_refused():
    plain = [case for case in CASES if expected_number(case.expected) is not None]
    refused = [case for case in plain if case.is_right and case.is_mistaken]
    assert [case for case in plain if case.is_mistaken and not case.is_right] == []
    assert len(refused) < 0.02 * sum(case.is_right for case in plain)


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("0.0000001", "\\boxed{0.0}"),
        ("3.2 \\times 10^{-7}", "\\boxed{0}"),
        ("(1, 0.0000002)", "\\boxed{(1, 0.0)}"),
        ("0.0001234", "\\boxed{0.0001236}"),
        ("2516_8", "\\boxed{2516_9}"),
        ("east", "\\boxed{seat}"),
        ("\\text{east}", "\\boxed{\\text{seat}}"),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_close_to_the_expected_answer_is_not_right(expected: str, answer: str, is_strict: bool):
    assert score(answer, expected, is_strict=is_strict)[0] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{42}\n\n#### Verification\nAdding 1 gives 43.",
        "### Answer\n\\boxed{42}\n\n#### Note\nthe unit is cm.",
        "#### 1. Setup\nx = 3\n#### 2. Result\n\\boxed{42}\n#### Step 3\n41 + 1 is right.",
        "so 6 * 7\n#### 42",
        "#### 42\n\n#### Note\nGood.",
        "\\boxed{41}\n#### 42",
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_headings_of_markdown_are_no_answers(text: str, is_strict: bool):
    assert score(text, "42", is_strict=is_strict)[0] == 1.0
