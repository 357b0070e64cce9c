# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.waiting import growth, wait_until


def test_a_wait_ends_with_its_condition_or_names_it():
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), "third answer")
    with pytest.raises(AssertionError, match="no fourth answer within 0 s .* still none"):
        wait_until(lambda: False, "fourth answer", 0.0, explain=lambda: "still none")


def test_growth_tells_linear_from_quadratic():
    assert growth(lambda size: sum(range(100 * size)), 500) < 8
    assert growth(lambda size: [sum(range(size)) for _ in range(size)], 500) > 8
