# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one self-contained page with the curves of a run, as inline SVG, and samples of its rollouts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from html import escape
from pathlib import Path

from conversion.files.durable import write_atomic

Series = Sequence[tuple[float, float]]
"""(step, value) points in order of step."""

PHASES = ("generation", "reward", "train", "refit", "validation", "checkpoint")
HIDDEN_PHASES = ("reward", "checkpoint")
SUPERVISED_PHASES = ("train", "validation", "checkpoint")
PAIRS = "val/validation-default_"
"""Prefix of the metrics of held-out pairs."""
NUM_SAMPLES = 24
# Their rows have a few KB each.
SAMPLES_BYTES = 2**19
METRIC_KEYS = {"step"}
SAMPLE_KEYS = {"step", "split", "prompt", "text", "extracted", "expected", "reward", "status"}
WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 28
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#6b7280")
NUM_TICKS = 4
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
    rows, num_torn_rows = read_rows(metrics_file, METRIC_KEYS)
    samples, num_torn_samples = read_rows(samples_file, SAMPLE_KEYS, last_bytes=SAMPLES_BYTES)
    num_torn = num_torn_rows + num_torn_samples
    note = f"<p>{num_torn} torn lines of {escape(metrics_file.name)} and {escape(samples_file.name)} are left out.</p>" if num_torn else ""
    is_supervised = any("train/loss" in row for row in rows) and not any("train/reward" in row or "val/accuracy" in row for row in rows)
    charts = _supervised_charts(rows) if is_supervised else _rollout_charts(rows)
    page = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{_headline(rows)}</p>{note}<div class='charts'>{''.join(charts)}</div>"
        f"<h2>Samples, newest first</h2>{_sample_table(samples[-NUM_SAMPLES:][::-1])}</body></html>"
    )
    write_atomic(path, page)


def _rollout_charts(rows: Sequence[dict]) -> list[str]:
    return [
        line_chart("Reward (mean over valid rollouts)", {"train": _series(rows, "train/reward")}),
        line_chart("Held-out accuracy", {"validation": _series(rows, "val/accuracy")}),
        line_chart("KL generator to trainer", {"gen_kl_error": _series(rows, "train/gen_kl_error")}),
        line_chart("Generated tokens per rollout", {name: _series(rows, f"rollout/{name}_length") for name in ("mean", "max")}),
        line_chart("Loss", {"loss": _series(rows, "train/loss")}),
        line_chart("Gradient norm", {"grad_norm": _series(rows, "train/grad_norm")}),
        line_chart("Refit, seconds", {"refit": _series(rows, "refit/seconds")}),
        stacked_chart("Seconds by phase", {phase: _series(rows, f"time/{phase}") for phase in PHASES}),
        stacked_chart("Seconds hidden beside other phases", {phase: _series(rows, f"time/{phase}_hidden") for phase in HIDDEN_PHASES}),
    ]


def _supervised_charts(rows: Sequence[dict]) -> list[str]:
    charts = [line_chart("Held-out loss", {"validation": _held_out_loss(rows)})]
    if _series(rows, "train/accuracy"):
        titles = {"accuracy": "Preferred answers that win", "rewards_margin_mean": "Reward of the preferred answer above the other's"}
        for name, title in titles.items():
            charts.append(line_chart(title, {"train": _series(rows, f"train/{name}"), "validation": _series(rows, f"{PAIRS}{name}")}))
    return [
        *charts,
        line_chart("Loss", {"loss": _series(rows, "train/loss")}),
        line_chart("Gradient norm", {"grad_norm": _series(rows, "train/grad_norm")}),
        stacked_chart("Seconds by phase", {phase: _series(rows, f"time/{phase}") for phase in SUPERVISED_PHASES}),
    ]


def _held_out_loss(rows: Sequence[dict]) -> Series:
    return _series(rows, "val/val_loss") or _series(rows, f"{PAIRS}loss")


def read_rows(path: Path, keys: Set[str], *, last_bytes: int | None = None) -> tuple[list[dict], int]:
    """The objects of a file that have these keys, and the number of other lines, which a full disk or a power cut has torn."""
    found, num_torn, lines = [], 0, list[bytes]()
    if path.exists():
        with path.open("rb") as file:
            start = max(0, path.stat().st_size - last_bytes) if last_bytes else 0
            file.seek(start)
            # The first of the last lines may lack its beginning.
            lines = file.read().splitlines()[1 if start else 0 :]
    for line in lines:
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
        cells = "".join(f"<td class='text'>{escape(sample[key])}</td>" for key in ("prompt", "text", "extracted", "expected"))
        body += f"<tr><td>{sample['step']}</td><td>{escape(sample['split'])}</td>{cells}<td>{reward}</td></tr>"
    return f"<table>{header}{body}</table>"


def line_chart(title: str, series: Mapping[str, Series]) -> str:
    """One line per named series; a series without points is left out."""
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return _frame(title, "<text x='210' y='110' text-anchor='middle' class='muted'>no data yet</text>")
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or max(1e-12, abs(high) * 0.1)
    scale = _Scale(min(steps), max(steps), low - margin if low != 0 else 0.0, high + margin)
    parts = [scale.axes()]
    for colour, points in zip(COLOURS, drawn.values(), strict=False):
        path = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in points)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.6'/>")
        if len(points) < 40:
            parts += [f"<circle cx='{scale.x(step):.1f}' cy='{scale.y(value):.1f}' r='2.2' fill='{colour}'/>" for step, value in points]
    return _frame(title, "".join(parts), _legend(list(drawn)) if len(drawn) > 1 else "")


def stacked_chart(title: str, series: Mapping[str, Series]) -> str:
    """Bars over steps, one segment per named series; a step that a series lacks counts as 0."""
    steps = sorted({step for points in series.values() for step, _ in points})
    if not steps:
        return line_chart(title, {})
    by_step = {name: dict(points) for name, points in series.items()}
    top = max(sum(values.get(step, 0.0) for values in by_step.values()) for step in steps)
    scale = _Scale(min(steps) - 0.5, max(steps) + 0.5, 0.0, top or 1.0)
    width = max(0.6, 0.9 * (WIDTH - LEFT - RIGHT) / (max(steps) - min(steps) + 1))
    parts = [scale.axes()]
    for step in steps:
        base = 0.0
        for colour, values in zip(COLOURS, by_step.values(), strict=False):
            value = values.get(step, 0.0)
            height = scale.y(base) - scale.y(base + value)
            x, y = scale.x(step) - width / 2, scale.y(base + value)
            parts.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.2f}' height='{height:.2f}' fill='{colour}'/>")
            base += value
    return _frame(title, "".join(parts), _legend(list(series)))


class _Scale:
    """Maps steps and values to pixels of the plotting area."""

    def __init__(self, x_min: float, x_max: float, y_min: float, y_max: float) -> None:
        self.x_min, self.x_max = x_min, x_max if x_max > x_min else x_min + 1
        self.y_min, self.y_max = y_min, y_max

    def x(self, step: float) -> float:
        return LEFT + (step - self.x_min) / (self.x_max - self.x_min) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_min) / (self.y_max - self.y_min) * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> str:
        parts = []
        for i in range(NUM_TICKS + 1):
            value = self.y_min + (self.y_max - self.y_min) * i / NUM_TICKS
            y = self.y(value)
            parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' class='grid'/>")
            parts.append(f"<text x='{LEFT - 6}' y='{y + 3.5:.1f}' text-anchor='end'>{value:.3g}</text>")
        for step in sorted({math.ceil(self.x_min), math.floor(self.x_max), round((self.x_min + self.x_max) / 2)}):
            parts.append(f"<text x='{self.x(step):.1f}' y='{HEIGHT - 10}' text-anchor='middle'>{step}</text>")
        return "".join(parts)


def _legend(names: Sequence[str]) -> str:
    entries = zip(names, COLOURS, strict=False)
    return "<figcaption>" + " ".join(f"<span style='color:{colour}'>■</span> {escape(name)}" for name, colour in entries) + "</figcaption>"


def _frame(title: str, content: str, legend: str = "") -> str:
    heading = f"<text x='{LEFT}' y='18' class='title'>{escape(title)}</text>"
    return f"<figure><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(title)}'>{heading}{content}</svg>{legend}</figure>"
