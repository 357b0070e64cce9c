# SPDX-License-Identifier: Apache-2.0
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.store.evaluations import consensus_at_k, mean_pass_at_k, pass_at_k


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers(correct: list[bool], k: int):
    k = min(k, len(correct))
    choices = list(combinations(correct, k))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        (["4", "5", "4"], 3, 1.0),
        (["5", "5", "4"], 3, 0.0),
        # The earlier wins a tie; empty answers do not vote.
        (["4", "5"], 2, 1.0),
        (["5", "4"], 2, 0.0),
        (["", "", "4"], 3, 1.0),
        # Two whole groups of two, and one answer left over.
        (["4", "4", "5", "5", "4"], 2, 0.5),
        (["", "", "4", "4"], 2, 0.5),
        (["", ""], 2, None),
    ],
)
def test_consensus_by_hand(answers: list[str], k: int, expected: float | None):
    assert consensus_at_k(answers, [answer == "4" for answer in answers], k) == expected


def test_pass_at_k_by_hand():
    assert (
        pass_at_k(4, 1, 1) == 0.25
        and pass_at_k(4, 1, 2) == 0.5
        and pass_at_k(4, 4, 2) == 1.0
        and pass_at_k(4, 0, 4) == 0.0
    )
    assert mean_pass_at_k([[True, False], [False, False]], 1) == 0.25
    assert mean_pass_at_k([[True, False], [False, False]], 2) == 0.5


def test_too_few_rollouts_are_refused():
    with pytest.raises(ValueError, match="k=3 needs .* not 2"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="k=2 needs .* not 1"):
        consensus_at_k(["4"], [True], 2)
