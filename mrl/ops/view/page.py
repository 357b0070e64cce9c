# SPDX-License-Identifier: Apache-2.0
"""`report.html`: the page of a run as one file that needs no server and no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from conversion.files.durable import write_atomic
from mrl.metrics import charts
from mrl.ops.view.run_data import rule_table, run_data
from mrl.store.run_files import Json, State

HERE = Path(__file__).parent
SCRIPTS = tuple(
    HERE / name
    for name in ("uplot.js", "page.js", "overview.js", "rollouts.js", "timeline.js", "weights.js", "start.js")
)
STYLES = (HERE / "uplot.css", HERE / "page.css")


def write_report(path: Path, *, state: State | None = None) -> None:
    """Writes the page of the run folder that holds `path`, and replaces an older page at once."""
    write_atomic(path, page([run_data(path.parent, state=state)]))


def page(runs: Sequence[Json], *, is_live: bool = False, scripts: Sequence[Path] = SCRIPTS) -> str:
    """The page of these runs, or of what `scripts` show. A live page asks its server for news and rollouts it lacks."""
    data = data_of(runs, is_live=is_live)
    script = "\n".join(path.read_text(encoding="utf-8") for path in scripts)
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    # The browser runs and loads nothing but these two texts, whatever a model has written.
    asked = "'self'" if is_live else "'none'"
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {asked}"
    title = " and ".join(str(run["name"]) for run in runs)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width, initial-scale=1"><meta '
        'name="referrer" content="no-referrer">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><noscript>This page needs "
        "JavaScript.</noscript>"
        f'<div id="page"></div><script type="text/plain" id="data">{base64.b64encode(data).decode()}</script>'
        f"<script>{script}</script></body></html>"
    )


def data_of(runs: Sequence[Json], *, is_live: bool) -> bytes:
    """Packs the data that the page's script shows."""
    return compressed({"runs": list(runs), "rules": rule_table(), "charts": charts(), "is_live": is_live})


def compressed(value: Json | list[dict]) -> bytes:
    """A JSON value as the page's script reads it."""
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 6, mtime=0)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
