from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from mrl.envs.scorer import Answer, Scorer
from mrl.types import Verdict

LIMIT_S = 20.0


class Gate:
    """An environment whose first round ends when the test says so; `rounds` has the texts of each."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.rounds: list[list[str]] = []
        self.gave_up = False

    def score(self, items: Sequence[tuple[str, str]], *, gives_up: Callable[[], bool]) -> list[Verdict]:
        self.rounds.append([text for text, _ in items])
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)
        self.gave_up = gives_up()
        return [Verdict(float(text == expected), True, "ok", "", text) for text, expected in items]


def answers(*texts: str, env_name: str = "gate") -> list[Answer]:
    return [Answer(f"id of {text}", env_name, (text, "b")) for text in texts]


def test_answers_are_handed_in_while_another_hangs_and_then_scored_together():
    gate = Gate()
    scorer = Scorer(lambda: {"gate": gate}, timeout_s=LIMIT_S)
    scorer.submit(answers("a"))
    assert gate.begun.wait(LIMIT_S)
    # Neither of these waits for the first.
    scorer.submit(answers("b"))
    scorer.submit(answers("c", "d"))
    assert gate.rounds == [["a"]]
    gate.may_end.set()
    verdicts, seconds = scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert gate.rounds == [["a"], ["b", "c", "d"]]
    assert {name: verdict.reward for name, verdict in verdicts.items()} == {f"id of {text}": float(text == "b") for text in "abcd"}
    assert seconds > 0 and not gate.gave_up
    assert scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S) == ({}, 0.0)
    scorer.close()


def test_patience_counts_from_the_end_of_the_generation():
    gate = Gate()
    gate.may_end.set()
    scorer = Scorer(lambda: {"gate": gate}, timeout_s=LIMIT_S)
    scorer.submit(answers("a"))
    scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert not gate.gave_up
    gate.may_end.clear()
    scorer.submit(answers("a"))
    threading.Timer(0.05, gate.may_end.set).start()
    scorer.collect(patience_s=0.0, timeout_s=LIMIT_S)
    assert gate.gave_up
    scorer.close()


def test_a_round_that_never_ends_is_an_error():
    gate = Gate()
    scorer = Scorer(lambda: {"gate": gate}, timeout_s=LIMIT_S)
    scorer.submit(answers("a"))
    with pytest.raises(TimeoutError):
        scorer.collect(patience_s=0.0, timeout_s=0.01)
    gate.may_end.set()
    scorer.close()


def test_each_environment_judges_its_own_and_its_error_reaches_the_caller():
    one, other = Gate(), Gate()
    one.may_end.set()
    scorer = Scorer(lambda: {"one": one, "other": other}, timeout_s=LIMIT_S)
    scorer.submit(answers("a", env_name="one") + answers("b", env_name="missing"))
    with pytest.raises(KeyError, match="missing"):
        scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert (one.rounds, other.rounds) == ([["a"]], [])
    scorer.close()
