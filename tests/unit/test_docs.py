"""Every table in docs/ says what the JSON says that a test part wrote."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.render_docs import DOCS, parts_of, render_page, render_part
from tests.long.record import record

PAGES = sorted(DOCS.glob("*.md"))


def test_pages_show_what_was_measured():
    outdated = [page.name for page in PAGES if render_page(page.read_text(), DOCS / "data") != page.read_text()]
    assert outdated == [], "run `python -m scripts.render_docs`"


def test_every_measurement_is_shown():
    shown = {part for page in PAGES for part in parts_of(page.read_text())}
    assert {path.stem for path in (DOCS / "data").glob("*.json")} <= shown


def test_the_start_page_lists_every_page():
    start = (DOCS / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"]({page.name})" not in start] == []


def test_a_table_is_rendered_from_its_file(tmp_path: Path):
    page = "# Speed\n\n<!-- data: speed -->\nold\n<!-- end of data -->\nafter\n\n<!-- data: absent -->\n<!-- end of data -->\n"
    host = {"cpu": "A CPU", "num_cores": 2, "memory_gib": 24}
    rows = [{"seed": 0, "tokens_per_s": 12.34567}, {"seed": 1, "tokens_per_s": None, "note": "cold"}]
    data = {"commit": "abc1234", "command": "scripts/test.sh --long speed", "host": host, "date": "2026-01-31", "rows": rows}
    (tmp_path / "speed.json").write_text(json.dumps(data))
    rendered = render_page(page, tmp_path)
    assert rendered == (
        "# Speed\n\n<!-- data: speed -->\n"
        "| seed | tokens per s | note |\n| --- | --- | --- |\n| 0 | 12.35 | – |\n| 1 | – | cold |\n\n"
        "Measured 2026-01-31 at commit `abc1234` by `scripts/test.sh --long speed` on A CPU, 2 cores, 24 GiB.\n"
        "<!-- end of data -->\nafter\n\n<!-- data: absent -->\nNot yet run.\n<!-- end of data -->\n"
    )
    assert render_page(rendered, tmp_path) == rendered
    assert parts_of(page) == ["speed", "absent"]


def test_what_a_part_records_can_be_rendered(tmp_path: Path):
    record("speed", [{"seed": 0, "minutes": 1.5}], folder=tmp_path)
    data = json.loads((tmp_path / "speed.json").read_text())
    assert data["part"] == "speed" and data["command"] == "bash scripts/test.sh --long speed"
    assert data["host"]["num_cores"] >= 1 and data["host"]["memory_gib"] >= 1 and data["host"]["cpu"]
    table, _, source = render_part(tmp_path / "speed.json").partition("\n\n")
    assert table == "| seed | minutes |\n| --- | --- |\n| 0 | 1.5 |"
    assert source.startswith(f"Measured {data['date']} at commit `{data['commit']}` by ")
