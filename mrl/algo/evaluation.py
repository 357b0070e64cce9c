"""Scores of several independent answers to one problem. Pure functions; `correct` and `answers` are in the order of sampling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Probability that one of `k` answers, drawn without replacement from these, is right (the unbiased estimate of arXiv:2107.03374).

    Raises:
        ValueError: there are fewer than `k` answers.
    """
    if k > num_answers:
        raise ValueError(f"{num_answers} answers to a problem cannot show what {k} would; ask for more, or lower k")
    return 1.0 - math.comb(num_answers - num_correct, k) / math.comb(num_answers, k)


def consensus_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> float | None:
    """Share of the whole groups of `k` consecutive answers whose most frequent one is right; the earlier wins a tie (arXiv:2203.11171).

    Empty answers do not vote, and a group of them is wrong. None if no answer votes: the environment extracts nothing.

    Raises:
        ValueError: there are fewer than `k` answers.
    """
    if k > len(answers):
        raise ValueError(f"{len(answers)} answers to a problem cannot show what {k} would; ask for more, or lower k")
    if not any(answers):
        return None
    starts = range(0, len(answers) - k + 1, k)
    return sum(_is_majority_right(answers[start : start + k], correct[start : start + k]) for start in starts) / len(starts)


def _is_majority_right(answers: Sequence[str], correct: Sequence[bool]) -> bool:
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return False
    # Of equal counts, the answer that was counted first.
    winner = votes.most_common(1)[0][0]
    return correct[answers.index(winner)]
