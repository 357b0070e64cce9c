import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.order import epoch_order, prompts_at, prompts_left, prompts_of_step


@given(st.integers(1, 200), st.integers(0, 5), st.integers(0, 2**32))
def test_an_epoch_takes_every_prompt_once(num_prompts: int, epoch: int, seed: int):
    assert sorted(epoch_order(num_prompts, seed=seed, epoch=epoch).tolist()) == list(range(num_prompts))


def test_the_order_is_fixed_for_ever():
    assert epoch_order(8, seed=42, epoch=0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]
    assert epoch_order(8, seed=42, epoch=1).tolist() != epoch_order(8, seed=42, epoch=0).tolist()
    assert epoch_order(8, seed=43, epoch=0).tolist() != epoch_order(8, seed=42, epoch=0).tolist()


def test_without_shuffle_the_order_of_the_file():
    assert prompts_at(4, 4, num_prompts=6, seed=0, shuffle=False) == [(0, 4), (0, 5), (1, 0), (1, 1)]


@given(st.integers(1, 20), st.integers(1, 50), st.integers(0, 30), st.integers(0, 30))
def test_a_position_is_one_number(num_prompts: int, position: int, first: int, second: int):
    def at(position: int, count: int) -> list[tuple[int, int]]:
        return prompts_at(position, count, num_prompts=num_prompts, seed=7)

    assert at(position, first + second) == at(position, first) + at(position + first, second)


def test_steps_cross_epochs_without_gap_or_repetition():
    taken = [pick for step in range(10) for pick in prompts_of_step(step, prompts_per_step=3, num_prompts=10, seed=1)]
    assert len(set(taken)) == 30
    assert {epoch for epoch, _ in taken} == {0, 1, 2}


def test_a_step_larger_than_the_data_set():
    picked = prompts_of_step(0, prompts_per_step=7, num_prompts=3, seed=1)
    assert [epoch for epoch, _ in picked] == [0, 0, 0, 1, 1, 1, 2]


@given(st.integers(1, 20), st.integers(1, 3), st.data())
def test_what_is_consumed_is_left_out_and_nothing_else(num_prompts: int, num_epochs: int, data: st.DataObject):
    names = [f"p{index}" for index in range(num_prompts)]
    whole = list(prompts_left(set(), num_prompts, names.__getitem__, num_epochs=num_epochs, seed=7))
    assert whole == prompts_at(0, num_epochs * num_prompts, num_prompts=num_prompts, seed=7)
    consumed = data.draw(st.sets(st.sampled_from(whole)))
    left = list(
        prompts_left({(epoch, names[index]) for epoch, index in consumed}, num_prompts, names.__getitem__, num_epochs=num_epochs, seed=7)
    )
    assert left == [pick for pick in whole if pick not in consumed]


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="data.train.data_path"):
        prompts_at(0, 1, num_prompts=0, seed=0)
