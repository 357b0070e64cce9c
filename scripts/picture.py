# SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture of a run: the first charts of its report, beside each other, as one SVG.

Usage: python -m scripts.picture RUN_FOLDER docs/run.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mrl.store.report import HEIGHT, STYLE, WIDTH

COLUMNS, GAP = 3, 12
CHARTS = ("Reward", "Held-out accuracy", "KL generator", "Gradient norm", "Refit", "Seconds by phase")


def picture(report: str) -> str:
    """The SVG of CHARTS of a report's page, `COLUMNS` in a row."""
    charts = re.findall(r"<svg [^>]*aria-label='([^']*)'>(.*?)</svg>", report, re.DOTALL)
    chosen = [content for start in CHARTS for label, content in charts if label.startswith(start)]
    assert len(chosen) == len(CHARTS), f"the report has the charts {[label for label, _ in charts]}"
    parts = []
    for index, content in enumerate(chosen):
        row, column = divmod(index, COLUMNS)
        parts.append(f"<g transform='translate({column * (WIDTH + GAP)} {row * (HEIGHT + GAP)})'>{content}</g>")
    size = f"{COLUMNS * (WIDTH + GAP) - GAP} {-(-len(chosen) // COLUMNS) * (HEIGHT + GAP) - GAP}"
    rules = "".join(rule.replace("svg ", "") for rule in re.findall(r"svg [^{}]*\{[^{}]*\}", STYLE))
    background = "<rect width='100%' height='100%' fill='white'/>"
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {size}'><style>{rules}</style>{background}{''.join(parts)}</svg>\n"


if __name__ == "__main__":
    run, out = map(Path, sys.argv[1:])
    out.write_text(picture((run / "report.html").read_text(encoding="utf-8")), encoding="utf-8")
