# SPDX-License-Identifier: Apache-2.0
"""Curves of the parts of a reward, of one run and of two laid over each other, in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from mrl.ops.view.page import page
from mrl.ops.view.run_data import run_data
from scripts.chromium import Tab
from tests.browser.test_plan import texts
from tests.browser.test_view import open_report
from tests.unit.ops.view.runs import make_run, row, write_metrics


def test_components_of_rewards_have_curves_in_the_colour_of_their_run(tab: Tab, tmp_path: Path):
    folders = [make_run(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        steps = [row(step, rollout__math__reward_right=0.1 * step, rollout__math__reward_std=0.1) for step in range(5)]
        write_metrics(folder, [{**each, "val/math/reward_right": each["train/reward"]} for each in steps])
    open_report(tab, folders[0])
    tab.wait("document.querySelector('.chart canvas')")
    titles, labels = texts(tab, ".u-title"), texts(tab, ".u-label")
    assert {"Parts of the reward", "Parts of the held-out reward"} <= set(titles)
    assert labels.count("rollout/math/reward_right") == labels.count("val/math/reward_right") == 1
    assert "rollout/math/reward_std" not in labels
    (tmp_path / "both.html").write_text(page([run_data(folder) for folder in folders]))
    tab.open(f"file://{tmp_path}/both.html")
    tab.wait("document.querySelector('.chart canvas')")
    found = tab.evaluate(
        "charts.map(([plot]) => plot.series.slice(1).map((one) => [one.label, one._stroke ?? one.stroke()]))"
    )
    curves = [curve for chart in cast("list[list[list[str]]]", found) for curve in chart]
    of_run = {name: {stroke for text, stroke in curves if text.startswith(f"{name} ")} for name in ("one", "two")}
    assert len(of_run["one"]) == len(of_run["two"]) == 1 and of_run["one"] != of_run["two"]
