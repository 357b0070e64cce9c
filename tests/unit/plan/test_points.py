# SPDX-License-Identifier: Apache-2.0
"""The memory model against peaks that real runs of Megatron-Core measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from scripts.bench import plan_points
from tests.sources import ROOT

POINTS, LATER = (
    json.loads((ROOT / f"tests/data/memory_points/{name}.json").read_text(encoding="utf-8"))
    for name in ("points", "later")
)


@pytest.fixture(scope="module")
def rows() -> list[plan_points.TableRow]:
    return plan_points.rows_of(POINTS)[0]


def test_points_that_nothing_was_fitted_on_are_predicted(rows: list[plan_points.TableRow]):
    errors = {name: plan_points.errors_of(rows, name) for name in ("allocated error", "peak error")}
    assert len(errors["allocated error"]) >= 17 and len(errors["peak error"]) >= 21
    assert statistics.median(errors["allocated error"]) <= 0.005 and max(errors["allocated error"]) <= 0.02
    assert statistics.median(errors["peak error"]) <= 0.03 and max(errors["peak error"]) <= 0.10


def test_points_that_came_later_are_predicted():
    rows, left_out = plan_points.rows_of(LATER)
    (strange,) = left_out.values()
    assert strange.endswith("does not know: flags.other.overlap-moe-expert-parallel-comm") and len(rows) >= 40
    assert {row["fitted"] for row in rows} == {"no"}
    allocated, peaks = (sorted(plan_points.errors_of(rows, f"{name} error")) for name in ("allocated", "peak"))
    assert allocated[-1] <= 0.02
    assert statistics.median(peaks) <= 0.02 and peaks[-2] <= 0.08 and peaks[-1] <= 0.13


def test_a_point_with_what_the_model_does_not_know_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    known = next(point for point in POINTS if point["kind"] == "dense-small")
    strange = [
        {"id": "nothing"},
        {**known, "id": "reglu", "model": {**known["model"], "activation": "reglu", "looped": 2}},
        {**known, "id": "experts", "model": {**known["model"], "moe": {"experts": 8}}},
        {**known, "id": "muon", "optimizer": {**known["optimizer"], "name": "muon"}},
        {**known, "id": "five stages", "pp": 5, "measured": {**known["measured"], "layers_on_rank": None}},
    ]
    (tmp_path / "points.json").write_text(json.dumps([known, *strange]))
    monkeypatch.setattr("sys.argv", ["plan_points", str(tmp_path / "points.json")])
    plan_points.main()
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[0])["run"] == known["id"]
    assert "left out: nothing: it lacks kind, quality" in printed
    assert (
        "left out: reglu: it has what the model does not know: model.activation='reglu', known: swiglu, "
        "squared_relu, gelu; model.looped"
    ) in printed
    assert "left out: experts: it lacks model.moe.topk, model.moe.moe_ffn" in printed
    assert "left out: muon: " in printed and "optimizer.name='muon', known: adam" in printed
    assert "left out: five stages: 12 layers in 5 stages; give" in printed


def test_half_of_the_points_of_each_kind_are_for_fitting():
    fitted = plan_points.is_fitted(POINTS)
    for kind in {point["kind"] for point in POINTS}:
        mine = [fitted[point["id"]] for point in POINTS if point["kind"] == kind]
        assert 0 <= len(mine) - 2 * sum(mine) <= 1


def test_offloading_leaves_the_main_parameters_on_the_gpu():
    none, quarter = (next(p for p in POINTS if p["id"].endswith(f"opt_offload_{share}:h100x16")) for share in (0, 25))
    saved = plan_points.predict(none)["allocated"] - plan_points.predict(quarter)["allocated"]
    assert saved == pytest.approx(
        none["measured"]["allocated_bytes"] - quarter["measured"]["allocated_bytes"], rel=0.02
    )


def test_a_rule_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mrl.plan.activations.BF16", 4)
    assert statistics.median(plan_points.errors_of(plan_points.rows_of(POINTS)[0], "peak error")) > 0.10
