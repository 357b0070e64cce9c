# SPDX-License-Identifier: Apache-2.0
"""Splits of additions."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from mrl.recipes.additions import Addition, split_additions, write_splits


def unordered(additions: list[Addition]) -> set[frozenset[int]]:
    return {frozenset((addition.left, addition.right)) for addition in additions}


def test_no_pair_of_operands_is_in_two_splits():
    splits = vars(split_additions(seed=3))
    for first, second in combinations(splits, 2):
        assert unordered(splits[first]).isdisjoint(unordered(splits[second])), (first, second)


def test_every_addition_that_carries_is_used_and_400_others():
    splits = split_additions(seed=3)
    used = set().union(*(unordered(additions) for additions in vars(splits).values()))
    all_pairs = {(left, right) for left in range(10, 100) for right in range(left, 100) if left + right < 100}
    carrying = {
        frozenset(pair) for pair in all_pairs if str(pair[0] + pair[1])[0] != str(pair[0] // 10 + pair[1] // 10)
    }
    assert len(carrying) == 640 and carrying < used and used <= {frozenset(pair) for pair in all_pairs}
    assert len(used - carrying) == 400
    assert len(splits.validation) == 256


@pytest.mark.parametrize(
    ("left", "right", "answer", "without"), [(27, 15, "42", "32"), (27, 12, "39", "39"), (45, 45, "90", "80")]
)
def test_the_answer_without_the_carry(left: int, right: int, answer: str, without: str):
    assert (Addition(left, right).answer, Addition(left, right).answer_without_carry) == (answer, without)


def test_splits_follow_from_the_seed():
    assert split_additions(seed=3) == split_additions(seed=3)
    assert split_additions(seed=3) != split_additions(seed=4)


def test_rows_are_questions_with_their_answers(tmp_path: Path):
    splits = split_additions(seed=0)
    write_splits(splits, tmp_path / "data")
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == len(splits.train) == len({row["question"] for row in rows})
    for row in rows:
        left, right = row["question"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(left) + int(right)
        assert (len(left), len(right), len(row["answer"])) == (2, 2, 2)


def test_preferences_are_right_sums_over_wrong_ones(tmp_path: Path):
    splits = split_additions(seed=0)
    write_splits(splits, tmp_path / "data")
    rows = [json.loads(line) for line in (tmp_path / "data" / "validation_preferences.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["chosen"]) for row in rows] == [
        (addition.question, addition.answer) for addition in splits.validation
    ]
    assert all(row["rejected"] != row["chosen"] and len(row["rejected"]) == 2 for row in rows)
    assert len({row["rejected"] for row in rows}) > 50
