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
