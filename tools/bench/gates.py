"""The gates that measured rows must pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Gate(NamedTuple):
    """A minimum for one field of the cases whose name matches; a maximum if ``at_most`` is set."""

    part: str
    case: str  # a regular expression
    field: str
    wanted: float
    at_most: bool = False


GATES = (
    Gate("steps 8b", r"decode \d+ x 1024$", "share_of_floor", 0.75),
    Gate("steps 8b", r"prefill", "share_of_floor", 0.65),
    Gate("steps 0.6b", r"decode 1 x 1024$", "share_of_floor", 0.5),
    Gate("invariant", r"", "share_of_plain", 0.9),
    Gate("throughput", r"256 sequences", "tokens_per_s", 20_000),
    Gate("transformers", r"sequences", "quire_ratio", 5.0),
    Gate("first answer", r"start", "time_s", 10.0, at_most=True),
    Gate("kernels", r"^decode .* (8|32) x 4096|^decode .* (64|256) x 1024", "share_of_floor", 0.85),
    Gate("kernels", r"^prefill", "share_of_floor", 0.6),
)


def compare(results: Sequence[dict[str, Any]]) -> None:
    """Add ratios to rows that were measured in two ways."""
    _compare_with_peer(results)
    _compare_invariant(results)


def _compare_invariant(results: Sequence[dict[str, Any]]) -> None:
    """The speed of batch-invariant steps relative to plain ones."""
    plain_ms = {
        row["case"]: row["time_ms"]
        for result in results
        if result["part"].startswith("steps")
        for row in result["rows"]
        if "time_ms" in row
    }
    for result in results:
        if result["part"].startswith("invariant"):
            for row in result["rows"]:
                if "time_ms" in row and row["case"] in plain_ms:
                    row["share_of_plain"] = plain_ms[row["case"]] / row["time_ms"]


def _compare_with_peer(results: Sequence[dict[str, Any]]) -> None:
    """Quire's tokens/s relative to the peer's on the same sequences."""
    rates = {
        row["case"]: row["tokens_per_s"]
        for result in results
        if result["part"] == "throughput"
        for row in result["rows"]
    }
    for result in results:
        if result["part"].startswith("transformers"):
            for row in result["rows"]:
                if row["case"] in rates:
                    row["quire_ratio"] = rates[row["case"]] / row["tokens_per_s"]


def verdict(part: str, row: Mapping[str, Any]) -> str:
    """``pass``, or ``MISS`` and by how much; empty for a row without a gate."""
    if row.get("is_right") is False:
        return f"WRONG: {row['failed']}" if "failed" in row else "WRONG"
    for gate in GATES:
        value = row.get(gate.field)
        if part.startswith(gate.part) and value is not None and re.search(gate.case, row["case"]):
            passes = value <= gate.wanted if gate.at_most else value >= gate.wanted
            sign = "<=" if gate.at_most else ">="
            return (
                "pass"
                if passes
                else f"MISS: {gate.field} {value:.3g}, wanted {sign} {gate.wanted:g}"
            )
    return ""
