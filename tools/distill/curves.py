"""The curves of a run as an SVG picture: losses by step, with the validations below."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from tools.distill.checkpoints import Progress

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 720, 200, 64, 28, 56
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_MAX_POINTS = 400

Points = list[tuple[float, float]]


def write_curves(progress: Progress, path: Path) -> None:
    """Write the picture, with a line for each loss of nonzero weight and each validation metric."""
    losses: dict[str, Points] = {}
    for row in progress.history:
        for name, value in row.items():
            if name not in ("step", "phase", "rate"):
                losses.setdefault(name, []).append((row["step"], value))
    held_out: dict[str, Points] = {}
    agreement: Points = []
    for row in progress.validations:
        agreement.append((row["step"], row["agreement"]))
        for name in ("kl", "hard"):
            held_out.setdefault(f"validation {name}", []).append((row["step"], row[name]))
    panels = [
        ("training losses, mean of neighbouring steps", {n: smooth(p) for n, p in losses.items()}),
        ("validation, nats a token", held_out),
        ("share of tokens on which the two agree", {"agreement": agreement}),
    ]
    drawn = [_panel(i, title, lines) for i, (title, lines) in enumerate(panels) if any(lines)]
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 24} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(drawn) + "\n</svg>\n",
        encoding="utf-8",
    )


def smooth(points: Points) -> Points:
    """At most 400 points, each the mean of an equal number of neighbours."""
    size = math.ceil(len(points) / _MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)] if points else []
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def _panel(place: int, title: str, lines: dict[str, Points]) -> str:
    top = _TOP + place * (_HEIGHT + _GAP)
    points = [point for line in lines.values() for point in line if math.isfinite(point[1])]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1
    low, high = min(y for _, y in points), max(y for _, y in points)
    span = (high - low) or 1.0

    def at(x: float, y: float) -> str:
        return f"{_LEFT + x / right * _WIDTH:.1f},{top + (high - y) / span * _HEIGHT:.1f}"

    parts = [f'<text x="{_LEFT}" y="{top - 10}" font-weight="bold">{escape(title)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y, x = top + share * _HEIGHT, _LEFT + share * _WIDTH
        parts.append(
            f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _WIDTH}" y2="{y}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{high - share * span:.3g}</text>'
            f'<text x="{x}" y="{top + _HEIGHT + 16}" text-anchor="middle">'
            f"{share * right:.0f}</text>"
        )
    for i, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in line if math.isfinite(y))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<text x="{_LEFT + _WIDTH - 8}" y="{top + 14 + 15 * i}" text-anchor="end" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join(parts)
