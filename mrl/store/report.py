"""`report.html`: one self-contained page with the curves of a run and samples of its rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from conversion.files import write_atomic
from mrl.store.charts import Series, line_chart, stacked_chart

PHASES = ("generation", "reward", "train", "refit", "validation", "checkpoint")
HIDDEN_PHASES = ("reward", "checkpoint")
NUM_SAMPLES = 24
MAX_SAMPLE_CHARACTERS = 600
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1320px; padding: 0 1rem; color: #111827; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)); gap: 1rem }
figure { margin: 0; border: 1px solid #e5e7eb; border-radius: 8px; padding: .5rem } figcaption { font-size: 12px; padding-left: .5rem }
svg text { font: 11px system-ui, sans-serif; fill: #4b5563 } svg .title { font-size: 13px; font-weight: 600; fill: #111827 }
svg .grid { stroke: #e5e7eb } svg .muted { fill: #9ca3af }
table { border-collapse: collapse; width: 100%; font-size: 13px }
th, td { border-bottom: 1px solid #e5e7eb; text-align: left; vertical-align: top }
td.text { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
"""


def write_report(path: Path, *, metrics_file: Path, samples_file: Path, title: str) -> None:
    """Writes the page from the run's metrics and samples, replacing an older one at once."""
    rows = _read(metrics_file)
    samples = _read(samples_file)[-NUM_SAMPLES:]
    charts = [
        line_chart("Reward (mean over valid rollouts)", {"train": _series(rows, "train/reward")}),
        line_chart("Held-out accuracy", {"validation": _series(rows, "val/accuracy")}),
        line_chart("KL generator to trainer", {"gen_kl_error": _series(rows, "train/gen_kl_error")}),
        line_chart("Mean |dlogp|, generator vs trainer", {"mean_abs_dlogp": _series(rows, "train/mean_abs_dlogp")}),
        line_chart(
            "Generated tokens per rollout", {"mean": _series(rows, "rollout/mean_length"), "max": _series(rows, "rollout/max_length")}
        ),
        line_chart("Loss", {"loss": _series(rows, "train/loss")}),
        line_chart("Gradient norm", {"grad_norm": _series(rows, "train/grad_norm")}),
        line_chart("Refit, seconds", {"refit": _series(rows, "refit/seconds")}),
        stacked_chart("Seconds by phase", {phase: _series(rows, f"time/{phase}") for phase in PHASES}),
        stacked_chart("Seconds hidden beside other phases", {phase: _series(rows, f"time/{phase}_hidden") for phase in HIDDEN_PHASES}),
    ]
    page = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{_headline(rows)}</p><div class='charts'>{''.join(charts)}</div>"
        f"<h2>Samples, newest first</h2>{_sample_table(samples[::-1])}</body></html>"
    )
    write_atomic(path, page)


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _series(rows: Sequence[dict], name: str) -> Series:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _headline(rows: Sequence[dict]) -> str:
    if not rows:
        return "No step has finished yet."
    accuracy = _series(rows, "val/accuracy")
    text = f"{rows[-1]['step']} steps."
    if accuracy:
        text += f" Held-out accuracy {accuracy[0][1]:.3f} at step {accuracy[0][0]}, {accuracy[-1][1]:.3f} at step {accuracy[-1][0]}."
    return text


def _sample_table(samples: Sequence[dict]) -> str:
    header = "<tr><th>step</th><th>split</th><th>prompt</th><th>rollout</th><th>extracted</th><th>expected</th><th>reward</th></tr>"
    body = ""
    for sample in samples:
        reward = f"{sample['reward']:g}" if sample["status"] == "ok" else f"masked ({escape(sample['status'])})"
        cells = "".join(f"<td class='text'>{_cut(sample[key])}</td>" for key in ("prompt", "text", "extracted", "expected"))
        body += f"<tr><td>{sample['step']}</td><td>{escape(sample['split'])}</td>{cells}<td>{reward}</td></tr>"
    return f"<table>{header}{body}</table>"


def _cut(text: str) -> str:
    return escape(text if len(text) <= MAX_SAMPLE_CHARACTERS else text[:MAX_SAMPLE_CHARACTERS] + " …")
