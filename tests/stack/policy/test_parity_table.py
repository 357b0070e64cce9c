# SPDX-License-Identifier: Apache-2.0
"""Every policy feature against a plain one-rank computation: docs/measured/parity.md. All: long part "parity_table"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.long.record import Row, record
from tests.megatron import IS_NEWEST
from tests.stack.policy.parity import Errors, Result, distance, loss_errors, measure, run_config, save_example
from tests.stack.policy.parity_cells import CELLS, IN_CI, IN_TINY, ONE_RANK, PLAIN, Feature, Settings
from tests.stack.ranks import RankPool

NUM_STEPS = 5
MAX_LOSS_ERROR = 1e-5

Run = Callable[[str, Feature], Errors]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda model_type: save_example(tmp_path_factory.mktemp(model_type), model_type))


@pytest.fixture(scope="module")
def compare(ranks: RankPool, folder_of: Callable[[str], Path]) -> Run:
    """A feature's errors on one family; what several features compare with is computed once."""
    plain: dict[str, Result] = {}

    def run(model_type: str, feature: Feature) -> Errors:
        def steps(settings: Settings, num_ranks: int) -> Result:
            config = run_config(folder_of(model_type), {**ONE_RANK, **settings}, num_ranks)
            return measure(ranks, config, num_steps=feature.measured_step + 1, measured_step=feature.measured_step)

        key = f"{model_type} {feature.measured_step} {feature.plain}"
        if key not in plain:
            plain[key] = steps({**PLAIN, **feature.plain}, 1)
        return distance(steps(feature.settings, feature.num_ranks), plain[key], feature.measured_step)

    return run


def check(errors: Errors, feature: Feature) -> None:
    limits = feature.limits
    assert errors.loss <= limits.loss and errors.logprob <= limits.logprob and errors.gradient <= limits.gradient, (
        errors
    )


@pytest.mark.parametrize(("model_type", "feature"), IN_CI, ids=str)
def test_a_feature_computes_what_one_plain_rank_does(compare: Run, model_type: str, feature: Feature):
    check(compare(model_type, feature), feature)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Measurements of the long part; kept also if they miss the requirement."""
    measured: list[Row] = []
    yield measured
    if measured and IS_NEWEST:
        record("parity", measured, command="bash scripts/test.sh --long parity_table")


@pytest.mark.long("parity_table")
@pytest.mark.parametrize(("model_type", "feature"), CELLS, ids=str)
def test_every_feature_computes_what_one_plain_rank_does(
    compare: Run, rows: list[Row], model_type: str, feature: Feature
):
    errors, limits = compare(model_type, feature), feature.limits
    rows.append(
        dict(
            feature=feature.name,
            family=model_type,
            ranks=feature.num_ranks,
            loss=errors.loss,
            gradient=errors.gradient,
            logprob=errors.logprob,
            limits=f"{limits.loss:g}, {limits.gradient:g}, {limits.logprob:g}",
        )
    )
    check(errors, feature)


@pytest.fixture(scope="module")
def tiny_losses(ranks: RankPool, folder_of: Callable[[str], Path]) -> Callable[[str, Settings, int], list[float]]:
    """Losses of the steps of grpo_tiny.yaml, its own layout included, with these settings."""

    def losses(model_type: str, settings: Settings, num_ranks: int) -> list[float]:
        return measure(
            ranks, run_config(folder_of(model_type), settings, num_ranks), num_steps=NUM_STEPS, measured_step=0
        ).losses

    return losses


@pytest.fixture(scope="module")
def feature_off(tiny_losses: Callable[[str, Settings, int], list[float]]) -> Callable[[str], list[float]]:
    """Losses of grpo_tiny.yaml as it is, on the four ranks that it asks for."""
    return cache(lambda model_type: tiny_losses(model_type, {}, 4))


@pytest.mark.long("parity")
@pytest.mark.parametrize(("model_type", "feature"), IN_TINY, ids=str)
def test_a_feature_of_the_quickstart_changes_no_loss(
    tiny_losses: Callable[[str, Settings, int], list[float]],
    feature_off: Callable[[str], list[float]],
    model_type: str,
    feature: Feature,
):
    off = feature_off(model_type)
    errors = loss_errors(tiny_losses(model_type, feature.settings, feature.num_ranks), off)
    # Steps must do something, else any feature would pass.
    assert min(loss_errors(off[1:], off[:-1])) > 1e-3
    assert feature.why_unequal or max(errors) <= MAX_LOSS_ERROR, errors
