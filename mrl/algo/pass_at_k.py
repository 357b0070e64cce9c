"""The chance that at least one of k rollouts solves a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(num_rollouts: int, num_solved: int, k: int) -> float:
    """Estimate of pass@k from `num_rollouts` >= k rollouts of a prompt: the share of their subsets of k that hold a solution.

    Unbiased (arXiv:2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    Raises:
        ValueError: there are fewer than k rollouts.
    """
    if num_rollouts < k:
        raise ValueError(f"pass@{k} needs {k} rollouts of a prompt, there are {num_rollouts}")
    return 1.0 - math.comb(num_rollouts - num_solved, k) / math.comb(num_rollouts, k)


def mean_pass_at_k(solved: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over prompts of `pass_at_k`; `solved[i][j]`: rollout j of prompt i."""
    return sum(pass_at_k(len(one), sum(one), k) for one in solved) / len(solved)
