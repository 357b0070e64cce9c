# SPDX-License-Identifier: Apache-2.0
"""Every family on real engines: refit zero, other weights, transformers' logprobs; more in parts witness, layouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conversion.families.common import VllmParallel
from tests.long.record import Row, record
from tests.rollouts import StartEngine, random_requests
from tests.stack.rollout.trainer import SINGLE
from tests.stack.rollout.witness import EP2, GENERATING, MATRIX, RECORDED, Witness, witness

# A start of two workers takes most of the time. test_loaders.py has every worker of every layout, test_pipeline_run.py
# two workers of nemotron_h, with the trainer's logprobs.
SHORT = [*((name, SINGLE) for name in GENERATING), ("qwen3_moe", EP2)]


def label(value: object) -> str:
    return (
        f"tp{value.tp} ep{value.ep}{f' pp{value.pp}' if value.pp > 1 else ''}"
        if isinstance(value, VllmParallel)
        else str(value)
    )


@pytest.mark.parametrize(("model_type", "parallel"), SHORT, ids=label)
def test_witness(start_engine: StartEngine, tmp_path: Path, model_type: str, parallel: VllmParallel) -> None:
    seen = witness(start_engine, tmp_path, model_type, parallel, random_requests(16, max_new_tokens=8))
    assert seen.changed_by_zero == []
    assert (seen.parity.num_tokens, seen.parity.num_wrong) == (128, 0), seen.parity


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Rows that the long part measures; kept also if they are not what is required."""
    measured: list[Row] = []
    yield measured
    if measured:
        record("witness", measured)


@pytest.mark.long("layouts")
@pytest.mark.parametrize(("model_type", "parallel"), [each for each in MATRIX if each not in RECORDED], ids=label)
def test_witness_of_more_layouts(
    start_engine: StartEngine, tmp_path: Path, model_type: str, parallel: VllmParallel
) -> None:
    long_witness(start_engine, tmp_path, model_type, parallel)


@pytest.mark.long("witness")
@pytest.mark.parametrize(("model_type", "parallel"), RECORDED, ids=label)
def test_witness_of_all(
    start_engine: StartEngine, tmp_path: Path, rows: list[Row], model_type: str, parallel: VllmParallel
) -> None:
    started = time.monotonic()
    seen = long_witness(start_engine, tmp_path, model_type, parallel)
    rows.append(
        dict(
            model_type=model_type,
            tp=parallel.tp,
            ep=parallel.ep,
            pp=parallel.pp,
            tensors=seen.num_tensors,
            MB=seen.num_bytes / 1e6,
            tensors_changed_by_refit_zero=len(seen.changed_by_zero),
            tokens=seen.parity.num_tokens,
            tokens_left_out=seen.parity.num_excluded + seen.parity.num_reached,
            tokens_out_of_bound=seen.parity.num_wrong,
            max_logprob_difference=seen.parity.max_difference,
            seconds=round(time.monotonic() - started, 1),
        )
    )


def long_witness(start_engine: StartEngine, folder: Path, model_type: str, parallel: VllmParallel) -> Witness:
    """Shows a family in a layout over at least 2,000 tokens."""
    requests = random_requests(96, lengths=(3, 120), max_new_tokens=24)
    seen = witness(start_engine, folder, model_type, parallel, requests)
    print(seen)
    assert seen.changed_by_zero == []
    seen.parity.check(min_tokens=2000)
    return seen
