"""Reads and checks profiler traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import NamedTuple

PARTS = ("schedule", "inputs", "forward", "sample", "output")
# A captured greedy step computes no logits to sample from: its head finds the token.
GREEDY_PARTS = tuple(part for part in PARTS if part != "sample")


class Range(NamedTuple):
    """One named range; times in microseconds."""

    name: str
    begin: float
    end: float

    def holds(self, other: Range) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def read_trace(path: Path | str) -> list[dict]:
    """The events of a trace."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def ranges(path: Path | str) -> list[Range]:
    """Our own ranges, by start time; outer ones before inner ones."""
    found = [
        Range(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in read_trace(path)
        if event.get("cat") == "user_annotation"
    ]
    return sorted(found, key=lambda each: (each.begin, -each.end))


def are_whole(found: list[list[str]]) -> bool:
    """Whether every step has all of its parts, and the first, of a prompt, has one for sampling."""
    return found[0] == list(PARTS) and all(map(_is_whole, found))


def _is_whole(parts: list[str]) -> bool:
    """Whether a step has the parts of each pass between planning and returning its output."""
    num_passes = parts.count("forward")
    return any(
        parts == [each[0], *each[1:-1] * num_passes, each[-1]] for each in (PARTS, GREEDY_PARTS)
    )


def steps(path: Path | str) -> list[list[str]]:
    """The names of the parts of each step, in order. Every part is inside a step."""
    all_ranges = ranges(path)
    whole = [each for each in all_ranges if each.name == "step"]
    parts = [each for each in all_ranges if each.name != "step"]
    assert all(any(step.holds(part) for step in whole) for part in parts)
    return [[part.name for part in parts if step.holds(part)] for step in whole]
