# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.render_docs`: renders the tables of docs/*.md from docs/data/*.json, the measurements that test parts wrote.

The tables of config keys are rendered from the schema and its readers; see `scripts.config_page`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripts.config_page import config_tables

DOCS = Path(__file__).resolve().parents[1] / "docs"
# A page says `<!-- data: PART -->` where the table of docs/data/PART.json belongs, and where it ends.
CONFIG_BLOCK = re.compile(r"(<!-- config -->\n)(?:.*?\n)??(<!-- end of config -->)", re.DOTALL)
BLOCK = re.compile(r"(<!-- data: (\S+) -->\n)(?:.*?\n)??(<!-- end of data -->)", re.DOTALL)


def render_page(text: str, data_folder: Path) -> str:
    """The page with every table replaced by what `data_folder` holds now."""
    text = CONFIG_BLOCK.sub(lambda match: match[1] + config_tables() + match[2], text)
    return BLOCK.sub(lambda match: match[1] + render_part(data_folder / f"{match[2]}.json") + match[3], text)


def parts_of(text: str) -> list[str]:
    """The parts whose tables a page shows."""
    return [match[2] for match in BLOCK.finditer(text)]


def render_part(path: Path) -> str:
    """The table of one file, its columns named by the keys of the rows, and a line that says where the numbers come from."""
    if not path.exists():
        return "Not yet run.\n"
    data = json.loads(path.read_text(encoding="utf-8"))
    columns = list(dict.fromkeys(name for row in data["rows"] for name in row))
    lines = [[name.replace("_", " ") for name in columns], ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in data["rows"]]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    host = data["host"]
    machine = f"{host['cpu']}, {host['num_cores']} cores, {host['memory_gib']} GiB"
    return f"{table}\nMeasured {data['date']} at commit `{data['commit']}` by `{data['command']}` on {machine}.\n"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Rewrites the pages in place."""
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(render_page(page.read_text(encoding="utf-8"), DOCS / "data"), encoding="utf-8")


if __name__ == "__main__":
    main()
