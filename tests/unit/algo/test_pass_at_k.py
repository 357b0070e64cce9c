import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.algo.pass_at_k import mean_pass_at_k, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_is_the_share_of_subsets_that_hold_a_solution(solved: list[bool], data: st.DataObject):
    k = data.draw(st.integers(1, len(solved)))
    subsets = list(itertools.combinations(solved, k))
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 2) == 0.5 and pass_at_k(4, 4, 2) == 1.0 and pass_at_k(4, 0, 4) == 0.0
    assert mean_pass_at_k([[True, False], [False, False]], 1) == 0.25
    assert mean_pass_at_k([[True, False], [False, False]], 2) == 0.5


def test_more_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="pass@3 needs 3 rollouts of a prompt, there are 2"):
        pass_at_k(2, 1, 3)
