# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.order import LengthHints, PromptOrder, epoch_order
from mrl.types import Prompt


@given(st.integers(1, 200), st.integers(0, 5), st.integers(0, 2**32))
def test_an_epoch_takes_every_prompt_once(num_prompts: int, epoch: int, seed: int):
    assert sorted(epoch_order(num_prompts, seed=seed, epoch=epoch).tolist()) == list(range(num_prompts))


def test_the_order_is_fixed_for_ever():
    assert epoch_order(8, seed=42, epoch=0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert epoch_order(8, seed=42, epoch=1).tolist() != epoch_order(8, seed=42, epoch=0).tolist()
    assert epoch_order(8, seed=43, epoch=0).tolist() != epoch_order(8, seed=42, epoch=0).tolist()


def test_without_shuffle_the_order_of_the_file():
    assert PromptOrder([6], seed=0, shuffle=False).at(4, 4) == [(0, 4), (0, 5), (1, 0), (1, 1)]


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.integers(1, 500),
    st.integers(0, 30),
    st.integers(0, 30),
    st.data(),
)
def test_a_position_is_one_number(sizes: list[int], position: int, first: int, second: int, data: st.DataObject):
    one = st.one_of(st.floats(1e-3, 1e3), st.integers(1, 9))
    weights = data.draw(st.one_of(st.just([]), st.lists(one, min_size=len(sizes), max_size=len(sizes))))
    order = PromptOrder(sizes, seed=7, weights=weights)
    assert order.at(position, first + second) == order.at(position, first) + order.at(position + first, second)


@given(st.integers(1, 20), st.integers(1, 3), st.data())
def test_what_is_consumed_is_left_out_and_nothing_else(num_prompts: int, num_epochs: int, data: st.DataObject):
    names = [f"p{index}" for index in range(num_prompts)]
    order = PromptOrder([num_prompts], seed=7)
    whole = list(order.left(set(), names.__getitem__, num_epochs=num_epochs))
    assert whole == order.at(0, num_epochs * num_prompts)
    consumed = data.draw(st.sets(st.sampled_from(whole)))
    names_consumed = {(epoch, names[index]) for epoch, index in consumed}
    left = list(order.left(names_consumed, names.__getitem__, num_epochs=num_epochs))
    assert left == [pick for pick in whole if pick not in consumed]


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="data.train.data_path"):
        PromptOrder([0], seed=0)


def test_a_weight_is_a_share_of_every_step():
    """Seats of Sainte-Laguë by hand: quotients w / (2 k + 1) of 5, 3 and 1, highest first."""
    order = PromptOrder([4, 2, 3], seed=0, shuffle=False, weights=[5, 3, 1])
    parts = [0 if index < 4 else 1 if index < 6 else 2 for _, index in order.at(0, 9)]
    assert parts == [0, 1, 0, 0, 1, 2, 0, 1, 0]
    # Each data set has epochs of its own: the small one begins its second while the large one is in its first.
    assert order.at(0, 9) == [(0, 0), (0, 4), (0, 1), (0, 2), (0, 5), (0, 6), (0, 3), (1, 4), (1, 0)]


@given(st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 100)), min_size=2, max_size=5), st.integers(1, 300))
def test_weighted_prompts_are_each_asked_once_an_epoch_of_their_set(sets: list[tuple[int, float]], count: int):
    sizes, weights = [size for size, _ in sets], [weight for _, weight in sets]
    picked = PromptOrder(sizes, seed=3, weights=weights).at(0, count)
    assert len(set(picked)) == count
    first = 0
    for size, weight in sets:
        of_set = [epoch for epoch, index in picked if first <= index < first + size]
        assert of_set == sorted(of_set)
        assert [of_set.count(epoch) for epoch in range(len(of_set) // size)] == [size] * (len(of_set) // size)
        assert abs(len(of_set) - count * weight / sum(weights)) < len(sets)
        first += size


def prompt(name: str, length: int = 1, env_name: str = "math") -> Prompt:
    return Prompt(name, tuple(range(length)), "", "", env_name)


def test_expects_of_a_prompt_what_it_had_else_what_its_environment_has():
    hints = LengthHints()
    assert hints.expected(prompt("a")) == 0
    hints.note(prompt("a"), [10, 20])
    hints.note(prompt("b"), [60])
    hints.note(prompt("c", env_name="code"), [500])
    assert hints.expected(prompt("a")) == 15
    assert hints.expected(prompt("new")) == 30
    assert hints.expected(prompt("new", env_name="code")) == 500
    hints.note(prompt("a"), [2, 4])
    assert hints.expected(prompt("a")) == 3


def test_the_longest_come_first_and_equals_by_the_length_of_the_prompt():
    hints = LengthHints()
    hints.note(prompt("long"), [90])
    hints.note(prompt("short"), [10])
    asked = [
        (0, prompt("short")),
        (0, prompt("new", 3)),
        (0, prompt("newer", 7)),
        (0, prompt("newest", 3)),
        (1, prompt("long")),
    ]
    assert [one.prompt_id for _, one in hints.longest_first(asked)] == ["long", "newer", "new", "newest", "short"]
