"""Inline SVG charts: lines over steps, and stacked bars. No script, no style sheet from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Series = Sequence[tuple[float, float]]
"""(step, value) points in order of step."""

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 28
COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#6b7280")
NUM_TICKS = 4


def line_chart(title: str, series: Mapping[str, Series]) -> str:
    """One line per named series; a series without points is left out."""
    drawn = {name: points for name, points in series.items() if points}
    if not drawn:
        return _frame(title, "<text x='210' y='110' text-anchor='middle' class='muted'>no data yet</text>")
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    scale = _Scale(min(steps), max(steps), *_padded(min(values), max(values)))
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


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.05 * (high - low) or max(1e-12, abs(high) * 0.1)
    return (low - margin if low != 0 else 0.0), high + margin


def _legend(names: Sequence[str]) -> str:
    entries = zip(names, COLOURS, strict=False)
    return "<figcaption>" + " ".join(f"<span style='color:{colour}'>■</span> {escape(name)}" for name, colour in entries) + "</figcaption>"


def _frame(title: str, content: str, legend: str = "") -> str:
    heading = f"<text x='{LEFT}' y='18' class='title'>{escape(title)}</text>"
    return f"<figure><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(title)}'>{heading}{content}</svg>{legend}</figure>"
