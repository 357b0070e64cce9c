# SPDX-License-Identifier: Apache-2.0
"""Savings of features in memory. Writes docs/data/NAME.json, from which docs/measured/performance.md is rendered."""

from __future__ import annotations

import pytest

from tests.long.test_bench_long import bench, number

pytestmark = [pytest.mark.long("parity"), pytest.mark.timeout(600)]


def test_logprobs_in_chunks_need_the_memory_of_a_chunk():
    rows = bench("logprobs")
    peaks = {(row["pass"], row["method"], row["tokens"]): number(row, "peak gb") for row in rows}
    for row in rows:
        if row["method"] == "chunks":
            assert (
                peaks[row["pass"], "chunks", row["tokens"]]
                <= 0.3 * peaks[row["pass"], "log_softmax of float32 logits", 4096]
            ), row
            # Four times as many tokens, hardly more memory.
            assert peaks[row["pass"], "chunks", 16_384] <= 1.25 * peaks[row["pass"], "chunks", 4096], row
    assert sum(row["method"] == "chunks" for row in rows) == 4
