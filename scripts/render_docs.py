# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.render_docs`: renders all tables of docs/ from docs/data/*.json, the measurements of test parts.

The table of config keys comes from the schema, that of differences from NeMo RL from mrl/nemo/dialect; see
`scripts.config_page`. The table of faults comes from docs/reliability.json.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mrl.exit_codes import CODES
from scripts.config_page import config_tables, difference_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
# A page marks the place of docs/data/PART.json by `<!-- data: PART -->` (or `PART,PART`), or
# `<!-- data: PART worst N by COLUMN -->` for some rows.
NAMED_BLOCK = re.compile(
    r"(<!-- (reliability|config|differences|exit_codes) -->\n)(?:.*?\n)??(<!-- end of \2 -->)", re.DOTALL
)
BOUNDS: dict[str, Callable[[float, float], bool]] = {"at least": operator.ge, "at most": operator.le}
"""Columns of targets; each holds for the column before it."""
BLOCK = re.compile(r"(<!-- data: (\S+)(?: worst (\d+) by ([^>]+))? -->\n)(?:.*?\n)??(<!-- end of data -->)", re.DOTALL)


def render_page(text: str, data_folder: Path) -> str:
    """The page with every table replaced by what `data_folder` holds now."""
    tables = {
        "config": config_tables,
        "differences": difference_table,
        "exit_codes": exit_codes,
        "reliability": faults_table,
    }

    def block(match: re.Match[str]) -> str:
        return match[1] + _render_parts(match[2].split(","), data_folder, int(match[3] or 0), match[4]) + match[5]

    return BLOCK.sub(block, NAMED_BLOCK.sub(lambda match: match[1] + tables[match[2]]() + match[3], text))


def exit_codes() -> str:
    """The table of exit codes."""
    return _table([["Code", "Meaning", "Next"], ["---"] * 3, *([str(code), *words] for code, words in CODES.items())])


def _render_parts(parts: list[str], data_folder: Path, num_rows: int, column: str) -> str:
    """The tables of a block, and one line with its parts that nobody has run yet."""
    paths = [data_folder / f"{part}.json" for part in parts]
    missing = ", ".join(path.stem for path in paths if not path.exists())
    there = [path for path in paths if path.exists()]
    summaries = [_summary(path) for path in there] if len(parts) > 1 else []
    if summaries and None not in summaries:
        lines = [row for row in summaries if row]
        tables = [_table([[*lines[0]], ["---"] * len(lines[0]), *([*row.values()] for row in lines)])]
    else:
        tables = [render_part(path, num_rows, column) for path in there]
    # Neighbours of one origin name it once.
    for index, (table, following) in enumerate(itertools.pairwise(tables)):
        if (origin := table.splitlines()[-1]) == following.splitlines()[-1]:
            tables[index] = table.removesuffix(f"\n{origin}\n")
    return "\n".join([*tables, *([f"Not yet run: {missing}.\n"] if missing else [])])


def parts_of(text: str) -> list[str]:
    """The parts whose tables a page shows."""
    return [part for match in BLOCK.finditer(text) for part in match[2].split(",")]


def render_part(path: Path, num_rows: int = 0, column: str = "") -> str:
    """The table of one file, with the keys of its rows as columns, what misses its target above, the origin below.

    With `num_rows`, only the rows with the largest numbers in `column`, whatever their sign.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = data["rows"]
    if num_rows:
        (name,) = (name for name in rows[0] if name.replace("_", " ") == column)
        rows = sorted(rows, key=lambda row: abs(float(row[name] or 0)), reverse=True)[:num_rows]
    columns = list(dict.fromkeys(name for row in data["rows"] for name in row))
    lines = [[name.replace("_", " ") for name in columns], ["---"] * len(columns)]
    table = _table(lines + [[_cell(row.get(name)) for name in columns] for row in rows])
    most = f"The {len(rows)} largest of {len(data['rows'])} rows; `docs/data/{path.name}` has all. " if num_rows else ""
    return f"{targets(data['rows'])}{table}\n{most}{_origin(data)}\n"


def targets(rows: Sequence[Mapping[str, object]]) -> str:
    """A sentence on the targets that rows miss or meet; empty where there are none."""
    missed, num_met = list[str](), 0
    for row in rows:
        for (name, value), (bound, limit) in itertools.pairwise(row.items()):
            if bound not in BOUNDS or not isinstance(limit, int | float) or not isinstance(value, int | float):
                continue
            if BOUNDS[bound](value, limit):
                num_met += 1
            else:
                case = ", ".join(f"{key} {_cell(row[key])}" for key in list(row)[:2] if key not in ("result", name))
                missed.append(f"{name} is {_cell(value)}, {bound} {_cell(limit)} is wanted ({case})")
    if missed:
        return f"**Missed:** {'; '.join(missed)}.\n\n"
    return "Every target is met.\n\n" if num_met else ""


def _summary(path: Path) -> dict[str, str] | None:
    """One row for a GPU check that says whether it passed; None for other parts."""
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = data["rows"]
    if all("result" in row for row in rows):
        name = path.stem.removeprefix("gpu_")
        return (
            {"check": f"`{name}`"}
            | {key: str(rows[0][key]) for key in ("result", "GPU", "torch")}
            | {"measured": f"{data['date']}, commit `{data['commit']}`, {_machine(data)}"}
        )
    return None


def _origin(data: dict) -> str:
    """Sentence with date, commit, command and host of a measurement."""
    return f"Measured {data['date']} at commit `{data['commit']}` by `{data['command']}` on {_machine(data)}."


def _machine(data: dict) -> str:
    host = data["host"]
    return f"{host['cpu']}, {host['num_cores']} cores, {host['memory_gib']} GiB"


def faults_table() -> str:
    """Each fault injected on purpose, by kind, and what comes of it; in brackets the long part, if its test has one."""
    kinds: dict[str, list[str]] = {}
    for row in json.loads((DOCS / "reliability.json").read_text(encoding="utf-8")):
        part = f" ({row['part']})" if "part" in row else ""
        kinds.setdefault(row["fault"], []).append(f"{row['injection']}: {row['outcome']}{part}")
    rows = [[fault, "<br>".join(outcomes)] for fault, outcomes in kinds.items()]
    return _table([["fault", "injection: outcome (long part)"], ["---"] * 2, *rows])


def _table(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Rewrites the pages in place."""
    for page in sorted(DOCS.rglob("*.md")):
        page.write_text(render_page(page.read_text(encoding="utf-8"), DOCS / "data"), encoding="utf-8")


if __name__ == "__main__":
    main()
