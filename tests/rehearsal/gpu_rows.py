# SPDX-License-Identifier: Apache-2.0
"""Rows of te_models, large_run, te_calls and te_fp8, from one process: half their time is imports of libraries.

Takes Transformer Engine's folder, an empty one, and a key of large_run.RANKS; with the key `dense`, there are rows of
large_run alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.rehearsal import large_run, te_calls, te_fp8, te_models
from tests.rehearsal.gpu_host import become_gpu_host, put_memory_on


def rows(folder: Path, key: str) -> Iterator[tuple[str, te_models.Row | te_calls.Row | te_fp8.Row | large_run.Row]]:
    """Part and row."""
    put_memory_on("meta")
    for row in large_run.rows(folder, large_run.RANKS[key]):
        yield "large_run", row
    if key != "dense":
        for row in te_models.rows(folder):
            yield "te_models", row
        put_memory_on("cpu")
        for row in te_calls.rows(folder):
            yield "te_calls", row
        for row in te_fp8.rows(folder):
            yield "te_fp8", row


if __name__ == "__main__":
    become_gpu_host(Path(sys.argv[1]))
    for part, found in rows(Path(sys.argv[2]), sys.argv[3]):
        print(json.dumps({"part": part, "row": asdict(found)}), flush=True)
