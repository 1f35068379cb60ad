"""Formats the result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadtest.cpu.gates import Verdict
from loadtest.cpu.parts import QUIRE


def format_result(result: Mapping[str, Any], verdicts: Sequence[Verdict]) -> str:
    """One table of loads by side, one of servers, and one of gates."""
    parts = result["parts"]
    blocks = [
        _table(
            ("part", "load", "side", "tokens/s", "ratio", "floor", "ITL p50", "ITL p99", "cores"),
            [row for name, part in parts.items() for row in _load_rows(name, part)],
        ),
        _table(
            ("part", "side", "ready s", "peak GB"),
            [row for name, part in parts.items() for row in _server_rows(name, part)],
        ),
        *(f"{name} could not be measured: {reason}" for name, reason in result["failed"].items()),
        _table(
            ("gate", "measured", "wanted", "against", ""), [verdict.row() for verdict in verdicts]
        ),
    ]
    return "\n\n".join(block for block in blocks if block)


def _load_rows(name: str, part: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, load in part["loads"].items():
        ours = load["sides"][QUIRE]["tokens_per_s"]
        for side, figures in load["sides"].items():
            rate = figures["tokens_per_s"]
            disturbed = sum(each["disturbed"] for each in figures["rounds"])
            yield (
                name,
                key,
                side,
                f"{rate:,.1f}",
                "" if side == QUIRE else f"{ours / rate:.2f}x",
                f"{rate / load['floor_tokens_per_s']:.0%}",
                f"{figures['itl_p50_ms']:,.1f}",
                f"{figures['itl_p99_ms']:,.1f}",
                f"{figures['server_cores']:.2f}" + (f" ({disturbed} disturbed)" * bool(disturbed)),
            )


def _server_rows(name: str, part: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for side, server in part["servers"].items():
        yield name, side, f"{server['ready_s']:.1f}", f"{server['peak_bytes'] / 1e9:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
