# SPDX-License-Identifier: Apache-2.0
"""The judge of logprobs: a token may differ only where a choice of an expert, its own or an earlier one, could flip."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import tiny_model
from tests.parity import Parity, Scores, hf_scores

CLEAR, CLOSE = 1.0, 1e-6


def test_a_difference_needs_a_choice_that_could_flip():
    scores = Scores(
        np.zeros(4, np.float32), np.array([CLEAR, CLEAR, CLOSE, CLEAR]), np.array([CLEAR, CLEAR, CLOSE, CLOSE])
    )
    parity = Parity()
    parity.add(np.array([0.0, 0.0, 0.1, 0.1], np.float32), scores)
    assert (parity.num_tokens, parity.num_excluded, parity.num_reached, parity.num_wrong) == (4, 1, 1, 0)
    parity.add(np.array([0.0, 0.1, 0.0, 0.0], np.float32), scores)
    assert (parity.num_reached, parity.num_wrong) == (1, 1)
    with pytest.raises(AssertionError):
        parity.check(min_tokens=8)


def test_the_least_margin_is_that_of_all_before():
    model, sequence = tiny_model("qwen2_moe"), list(range(40))
    alone, whole = hf_scores(model, sequence[:30], sequence[30:]), hf_scores(model, sequence[:1], sequence[1:])
    assert np.array_equal(alone.least_margins, np.minimum.accumulate(whole.margins)[-10:])
    assert np.array_equal(alone.margins, whole.margins[-10:])
