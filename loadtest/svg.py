"""Small line charts as inline SVG, without scripts, style sheets or external resources."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 40
_MAX_POINTS = 200  # of a distribution, about
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d")

Series = tuple[str, Sequence[tuple[float, float]]]  # a name and its points, by rising x


def line_chart(title: str, x_label: str, series: Sequence[Series], *, steps: bool = False) -> str:
    """Draw all series in one chart over common axes that start at 0.

    Args:
        title: shown above the chart.
        x_label: shown below the x axis.
        series: the series to draw; those without points are left out.
        steps: hold each value until the next point, instead of joining points by straight lines.
    """
    series = [(name, points) for name, points in series if points]
    x_max = _round_up(max((x for _, points in series for x, _ in points), default=1.0))
    y_max = _round_up(max((y for _, points in series for _, y in points), default=1.0))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    # The names stand above the lines, which may run anywhere: one beside the title, others below.
    top = max(_TOP, 16 + 14 * sum(bool(name) for name, _ in series))
    bottom = top + height

    def place(x: float, y: float) -> str:
        return f"{_LEFT + x / x_max * width:.1f},{bottom - y / y_max * height:.1f}"

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {bottom + _BOTTOM}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="11">',
        f'<text x="{_LEFT}" y="14" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = _LEFT + share * width, bottom - share * height
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_max * share:g}</text>'
            f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{x_max * share:g}'
            f"</text>"
        )
    parts.append(
        f'<text x="{_LEFT + width / 2}" y="{bottom + _BOTTOM - 8}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    for index, (name, points) in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        drawn = _stepped(points) if steps else points
        path = " ".join(place(x, y) for x, y in drawn)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
            f'<text x="{_WIDTH - _RIGHT}" y="{14 + 14 * index}" text-anchor="end" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    return "".join(parts) + "</svg>"


def standalone(chart: str) -> str:
    """``chart`` as a standalone file, which viewers recognise as SVG only by its namespace."""
    return chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution of ``values``: (value, share of values at or below it)."""
    ordered = sorted(values)
    count = len(ordered)
    stride = max(1, count // _MAX_POINTS)
    points = [(ordered[i], (i + 1) / count) for i in range(0, count, stride)]
    if ordered and points[-1][1] < 1.0:
        points.append((ordered[-1], 1.0))
    return points


def _stepped(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    drawn = list(points[:1])
    for (_, held), (x, y) in itertools.pairwise(points):
        drawn += [(x, held), (x, y)]
    return drawn


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4 or 8 times a power of ten, so that quarters of it are short numbers."""
    if value < 1e-9:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10, 20) if step * power >= value * 0.9999)
