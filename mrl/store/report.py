"""`report.html`: one self-contained page with the curves of a run and samples of its rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from html import escape
from pathlib import Path

from conversion.files.durable import write_atomic
from mrl.store.charts import Series, line_chart, stacked_chart

PHASES = ("generation", "reward", "train", "refit", "validation", "checkpoint")
HIDDEN_PHASES = ("reward", "checkpoint")
SUPERVISED_PHASES = ("train", "validation", "checkpoint")
PAIRS = "val/validation-default_"
"""Prefix of the metrics of held-out pairs."""
NUM_SAMPLES = 24
METRIC_KEYS = {"step"}
SAMPLE_KEYS = {"step", "split", "prompt", "text", "extracted", "expected", "reward", "status"}
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
    """Writes the page from the run's metrics and samples, and replaces an older page at once. Leaves out torn lines, and counts them."""
    (rows, num_torn_rows), (samples, num_torn_samples) = _read(metrics_file, METRIC_KEYS), _read(samples_file, SAMPLE_KEYS)
    num_torn = num_torn_rows + num_torn_samples
    note = f"<p>{num_torn} torn lines of {escape(metrics_file.name)} and {escape(samples_file.name)} are left out.</p>" if num_torn else ""
    charts = _rollout_charts(rows) if has_rollouts(rows) else _supervised_charts(rows)
    page = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{_headline(rows)}</p>{note}<div class='charts'>{''.join(charts)}</div>"
        f"<h2>Samples, newest first</h2>{_sample_table(samples[-NUM_SAMPLES:][::-1])}</body></html>"
    )
    write_atomic(path, page)


def has_rollouts(rows: Sequence[dict]) -> bool:
    """Whether these metrics are from a run that samples rollouts; True if they do not tell."""
    return any("train/reward" in row or "val/accuracy" in row for row in rows) or not any("train/loss" in row for row in rows)


def _rollout_charts(rows: Sequence[dict]) -> list[str]:
    return [
        line_chart("Reward (mean over valid rollouts)", {"train": _series(rows, "train/reward")}),
        line_chart("Held-out accuracy", {"validation": _series(rows, "val/accuracy")}),
        line_chart("KL generator to trainer", {"gen_kl_error": _series(rows, "train/gen_kl_error")}),
        line_chart("Mean |dlogp|, generator vs trainer", {"mean_abs_dlogp": _series(rows, "train/mean_abs_dlogp")}),
        line_chart(
            "Generated tokens per rollout", {"mean": _series(rows, "rollout/mean_length"), "max": _series(rows, "rollout/max_length")}
        ),
        *_step_charts(rows),
        line_chart("Refit, seconds", {"refit": _series(rows, "refit/seconds")}),
        stacked_chart("Seconds by phase", {phase: _series(rows, f"time/{phase}") for phase in PHASES}),
        stacked_chart("Seconds hidden beside other phases", {phase: _series(rows, f"time/{phase}_hidden") for phase in HIDDEN_PHASES}),
    ]


def _supervised_charts(rows: Sequence[dict]) -> list[str]:
    accuracy = {"train": _series(rows, "train/accuracy"), "validation": _series(rows, f"{PAIRS}accuracy")}
    margin = {"train": _series(rows, "train/rewards_margin_mean"), "validation": _series(rows, f"{PAIRS}rewards_margin_mean")}
    of_pairs = [line_chart("Preferred answers that win", accuracy), line_chart("Reward of the preferred answer above the other's", margin)]
    return [
        line_chart("Held-out loss", {"validation": _held_out_loss(rows)}),
        *(of_pairs if accuracy["train"] else []),
        *_step_charts(rows),
        stacked_chart("Seconds by phase", {phase: _series(rows, f"time/{phase}") for phase in SUPERVISED_PHASES}),
    ]


def _step_charts(rows: Sequence[dict]) -> list[str]:
    return [
        line_chart("Loss", {"loss": _series(rows, "train/loss")}),
        line_chart("Gradient norm", {"grad_norm": _series(rows, "train/grad_norm")}),
    ]


def _held_out_loss(rows: Sequence[dict]) -> Series:
    return _series(rows, "val/val_loss") or _series(rows, f"{PAIRS}loss")


def _read(path: Path, keys: Set[str]) -> tuple[list[dict], int]:
    """The objects of a file that have these keys, and the number of other lines, which a full disk or a power cut has torn."""
    found, num_torn = [], 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and keys <= row.keys():
            found.append(row)
        else:
            num_torn += 1
    return found, num_torn


def _series(rows: Sequence[dict], name: str) -> Series:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _headline(rows: Sequence[dict]) -> str:
    if not rows:
        return "No step has finished yet."
    text = f"{rows[-1]['step']} steps."
    for name, series in (("accuracy", _series(rows, "val/accuracy")), ("loss", _held_out_loss(rows))):
        if series:
            text += f" Held-out {name} {series[0][1]:.3f} at step {series[0][0]}, {series[-1][1]:.3f} at step {series[-1][0]}."
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
