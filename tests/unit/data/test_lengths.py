from mrl.data.lengths import LengthHints
from mrl.types import Prompt


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
    asked = [(0, prompt("short")), (0, prompt("new", 3)), (0, prompt("newer", 7)), (0, prompt("newest", 3)), (1, prompt("long"))]
    assert [one.prompt_id for _, one in hints.longest_first(asked)] == ["long", "newer", "new", "newest", "short"]


def makespan(lengths: list[int], *, num_slots: int) -> int:
    """When the last of these rollouts ends, begun in this order, each in the slot that is free first."""
    slots = [0] * num_slots
    for length in lengths:
        slots[slots.index(min(slots))] += length
    return max(slots)


def test_a_long_rollout_is_not_alone_at_the_end():
    lengths = {"a": 2, "b": 2, "c": 2, "d": 2, "long": 10}
    hints = LengthHints()
    for name, length in lengths.items():
        hints.note(prompt(name), [length])
    asked = [(1, prompt(name)) for name in lengths]
    ordered = [lengths[one.prompt_id] for _, one in hints.longest_first(asked)]
    assert (makespan(list(lengths.values()), num_slots=2), makespan(ordered, num_slots=2)) == (14, 10)
