# SPDX-License-Identifier: Apache-2.0
"""A plan's page in a real Chromium: bars that tell their parts, tables that sort, and the line of what the GPU has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.ops.plan import main
from scripts.chromium import Tab, open_tab
from tests.sources import ROOT

ONE_NODE = [
    "cluster.num_nodes=1",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
]
ONE_NODE += ["policy.megatron_cfg.pipeline_model_parallel_size=1", "policy.megatron_cfg.context_parallel_size=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plan")
    shutil.copy(ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json", found / "config.json")
    assert main(["grpo_nanov3.yaml", f"policy.model_name={found}", *ONE_NODE, "--html", str(found / "plan.html")]) == 2
    return found


@pytest.fixture
def tab(folder: Path) -> Iterator[Tab]:
    with open_tab() as opened:
        opened.open(f"file://{folder}/plan.html", height=1400)
        opened.wait("document.querySelectorAll('.chart canvas').length === 2")
        yield opened
        assert opened.errors == [] and opened.requests == [f"file://{folder}/plan.html"]


def texts(tab: Tab, selector: str) -> list[str]:
    found = tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")
    assert isinstance(found, list)
    return found


def test_a_bar_tells_its_parts_under_the_mouse(tab: Tab):
    # The middle of six phases: train is the third.
    tab.evaluate("document.querySelector('.chart').scrollIntoView()")
    box = tab.evaluate(
        "(() => { const r = document.querySelector('.u-over').getBoundingClientRect(); return [r.x, r.y, r.width] })()"
    )
    assert isinstance(box, list)
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * 2.5 / 6, y=box[1] + 40)
    tab.wait("document.querySelector('.chart .u-series .u-value').textContent.startsWith('train')")
    told = dict(
        zip(texts(tab, ".chart:nth-child(1) .u-label"), texts(tab, ".chart:nth-child(1) .u-value"), strict=True)
    )
    # 12 bytes of 3.95 billion elements (docs/plan.md), and two of 5.87 billion.
    assert told["optimizer"] == "44.11" and told["gradients"] == "10.94" and told["KV cache"] == "0.00"
    # The highest pixels of the bar of train are of a part, and the same height over the bar of load is empty.
    colours = tab.evaluate(
        "(() => { const c = document.querySelector('.chart canvas'), p = uPlot.pxRatio, o = "
        "document.querySelector('.u-over'), x = (share) => (o.offsetLeft + o.clientWidth * share) * p, y = "
        "(o.offsetTop + o.clientHeight * 0.25) * p; return [2.5 / 6, 0.5 / 6].map((share) => "
        "c.getContext('2d').getImageData(x(share), y, 1, 1).data[3]) })()"
    )
    assert colours == [255, 0]


def test_a_click_on_a_head_sorts_the_layouts(tab: Tab):
    table = "section table:first-of-type"
    column = texts(tab, f"{table} th").index("GiB") + 1

    def shown() -> list[float]:
        return [
            float(text)
            for text in texts(tab, f"h2 + {table.removeprefix('section ')} td:nth-child({column})")
            if "." in text
        ]

    def click() -> None:
        tab.evaluate(f"document.querySelector('{table} th:nth-child({column})').click()")

    before = shown()
    assert len(before) > 3 and before != sorted(before)
    click()
    assert shown() == sorted(before)
    click()
    assert shown() == sorted(before, reverse=True)


def test_a_narrow_screen_needs_no_scrolling_sideways(tab: Tab, folder: Path):
    tab.requests.clear()
    tab.open(f"file://{folder}/plan.html", width=390, height=800)
    tab.wait("document.querySelectorAll('.chart canvas').length === 2")
    assert tab.evaluate("document.documentElement.scrollWidth <= 390")
    assert texts(tab, "h1") == [f"Plan of grpo_nanov3.yaml: {folder.name} on 8 h100-80g"]
