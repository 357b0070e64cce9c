# SPDX-License-Identifier: Apache-2.0
"""Takes a picture of a run's page, for the README and docs/report.md.

Usage: python -m scripts.picture RUN_FOLDER TAB PICTURE.png, TAB one of overview, rollouts, tokens, timeline
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from mrl.ops.view.page import page
from mrl.ops.view.run_data import run_data
from scripts.chromium import Tab, open_tab

WIDTH, HEIGHT = 1280, 860
# A short rollout, and a few lanes, leave most of a screen empty.
HEIGHTS = {"tokens": 400, "timeline": 800}
NUM_COLOURS = 96
MAX_BYTES = 200_000


def small_png(picture: bytes) -> bytes:
    """A PNG with few colours, which screens of text and lines do not miss."""
    shrunk = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(NUM_COLOURS).save(shrunk, "PNG", optimize=True)
    return shrunk.getvalue()


def show(tab: Tab, name: str) -> None:
    """Brings the page to a tab; `tokens` is a rollout of the tab `rollouts`."""
    tab.evaluate(f"document.querySelector('[data-tab={'rollouts' if name == 'tokens' else name}]').click()")
    if name == "tokens":
        tab.evaluate("document.querySelector('[data-tokens]').click()")
        tab.move_to(".token:not(.given)")
    if name == "timeline":
        tab.move_to(".lane:nth-child(4) .bar:nth-child(4)")
    if name == "overview":
        tab.wait("document.querySelectorAll('.chart canvas').length > 5")


def main(run: Path, name: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, open_tab() as tab:
        report = Path(folder) / "report.html"
        report.write_text(page([run_data(run, state="over")]), encoding="utf-8")
        tab.open(f"file://{report}", width=WIDTH, height=HEIGHTS.get(name, HEIGHT))
        show(tab, name)
        picture = small_png(tab.picture())
    assert len(picture) <= MAX_BYTES, f"{len(picture)} bytes; fewer than {NUM_COLOURS} colours make it smaller"
    out.write_bytes(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
