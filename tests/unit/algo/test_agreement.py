# SPDX-License-Identifier: Apache-2.0
"""Difference of two sides' logprobs: rounding passes, flips of routers are left out, another model is found."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrl.algo.agreement import FLIPPED_SHARE, MAX_MEAN_ERROR, MAX_MEAN_ERROR_OF_EXPERTS, find_disagreement, measure


def errors(differences: list[float], *, flipped_share: float = 0.0):
    """Errors of tokens whose trainer's logprobs differ by these from the generator's."""
    generator = np.full(len(differences), -1.5, np.float32)
    return measure([generator], [generator + np.array(differences, np.float32)], flipped_share=flipped_share)


def test_the_mean_counts_both_directions():
    found = errors([0.5, -0.5, 0.0, 0.0])
    assert (found.num_tokens, found.mean, found.largest, found.num_ruled_out) == (4, 0.25, 0.5, 0)


def test_a_few_flips_do_not_count_where_there_are_routers():
    flipped = [2.0, *[0.01] * 19]
    assert errors(flipped).mean == pytest.approx(0.1095)
    assert errors(flipped, flipped_share=FLIPPED_SHARE).mean == pytest.approx(0.01)
    # A model with other positions differs everywhere.
    assert errors([0.4] * 20, flipped_share=FLIPPED_SHARE).mean == pytest.approx(0.4)


def test_tokens_that_truncation_rules_out_are_counted_apart():
    found = errors([0.01, -math.inf, 0.01])
    assert (found.mean, found.num_ruled_out) == (pytest.approx(0.01), 1)


@pytest.mark.parametrize(
    ("differences", "precision", "chooses", "is_found"),
    [
        ([1e-5] * 64, "float32", False, False),
        # TF32.
        ([5e-4] * 64, "float32", False, False),
        ([0.02] * 64, "bfloat16", False, False),
        ([0.06] * 64, "bfloat16", True, False),
        ([0.02] * 64, "float32", False, True),
        ([0.2] * 64, "bfloat16", False, True),
        ([0.2] * 64, "bfloat16", True, True),
        ([math.nan, *[0.0] * 63], "float32", True, True),
        ([-math.inf] * 64, "float32", False, True),
    ],
)
def test_what_is_no_rounding_ends_the_start(differences: list[float], precision: str, chooses: bool, is_found: bool):
    text = find_disagreement(
        errors(differences, flipped_share=FLIPPED_SHARE if chooses else 0.0), precision, chooses=chooses
    )
    assert bool(text) == is_found
    if is_found:
        limit = (MAX_MEAN_ERROR_OF_EXPERTS if chooses else MAX_MEAN_ERROR)[precision]
        assert "over 64 tokens logprobs differ by" in text and f"in {precision} at most {limit} on average" in text
        assert "policy.generation.compare_at_start=false starts without this check" in text
