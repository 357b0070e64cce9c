# SPDX-License-Identifier: Apache-2.0
"""One self-contained page of a plan: stacked bars of memory by phase, seconds, and layouts, with figures on hover and tables to sort."""

from __future__ import annotations

from pathlib import Path

from conversion.files.durable import write_atomic
from mrl.plan.plan import Plan, as_data, describe
from mrl.plan.search import Found
from mrl.view.page import HERE, page

SCRIPTS = (HERE / "uplot.js", HERE / "page.js", Path(__file__).with_name("plan.js"), HERE / "start.js")


def write_page(path: Path, plan: Plan, found: Found | None) -> None:
    """Writes the page, and replaces an older one at once."""
    title = f"Plan of {plan.config.num_slots} {plan.gpu.name}"
    write_atomic(path, page([{"name": title, "lines": describe(plan), **as_data(plan, found)}], scripts=SCRIPTS))
