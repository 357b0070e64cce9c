# SPDX-License-Identifier: Apache-2.0
"""Scores of several rollouts of one prompt. Pure functions; rollouts are in the order in which they were sampled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of pass@k: the share of all subsets of k rollouts that contain a correct one.

    1 - C(n - c, k) / C(n, k), arXiv:2107.03374, equation 1.
    """
    _check_count(num_rollouts, k)
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over prompts of `pass_at_k`; `correct[i][j]`: rollout j of prompt i."""
    return sum(pass_at_k(len(one), sum(one), k) for one in correct) / len(correct)


def consensus_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> float | None:
    """Share of the groups of `k` consecutive answers whose majority is correct (arXiv:2203.11171). Incomplete groups do not count.

    The earlier answer wins a tie. Empty answers do not vote; a group without votes is wrong. None if no answer votes at all, because the
    environment extracts none.
    """
    _check_count(len(answers), k)
    if not any(answers):
        return None
    starts, num_right = range(0, len(answers) - k + 1, k), 0
    for start in starts:
        group = answers[start : start + k]
        if votes := Counter(filter(None, group)):
            # Of equal counts, the answer that was counted first.
            winner = votes.most_common(1)[0][0]
            num_right += correct[start + group.index(winner)]
    return num_right / len(starts)


def _check_count(num_rollouts: int, k: int) -> None:
    if num_rollouts < k:
        raise ValueError(f"{num_rollouts} rollouts of a prompt cannot give a score at {k}; sample more, or lower k")
