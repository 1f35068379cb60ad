"""The parts of a check: what each runs, and for how long at most."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """One process. What it prints as JSON lines with a ``case`` is its result."""

    name: str
    command: tuple[str, ...]  # after the interpreter
    limit_s: float


def gpu_parts(output: Path, options: Sequence[str], pytest: Sequence[str]) -> list[Part]:
    """Everything, within nine minutes together: where one part hangs, the others still run."""

    def bench(name: str, module: str, limit_s: float, *more: str) -> Part:
        return Part(name, ("-m", f"tools.bench.{module}", *more, *options), limit_s)

    small, large = ("--model", "qwen3-0.6b"), ("--model", "llama-3.1-8b")
    return [
        Part("gpu tests", ("-m", "pytest", "-m", "gpu", *pytest), 110),
        bench("steps 0.6b", "steps", 60, *small),
        bench("throughput", "throughput", 60, *small),
        bench("first answer", "first_answer", 50, *small),
        bench("steps 8b", "steps", 90, *large),
        bench("transformers", "transformers_peer", 70, *small),
        Part("kernels", ("-m", "kernels.bench", "--output", str(output)), 100),
    ]


def tiny_parts(options: Sequence[str]) -> list[Part]:
    """The same benches on a shape that a CPU runs in seconds."""
    modules = ("steps", "throughput", "first_answer", "transformers_peer")
    return [
        Part(module, ("-m", f"tools.bench.{module}", "--model", "tiny", *options), 100)
        for module in modules
    ]


def run_part(part: Part, output: Path) -> dict[str, Any]:
    """Its rows, as far as it came, and how it ended.

    All that it prints goes to ``<name>.log`` in ``output`` at once, and its rows to
    ``<name>.jsonl`` at its end.
    """
    stem = part.name.replace(" ", "-")
    log = output / f"{stem}.log"
    begun_s = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *part.command], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status: int | str = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            status = "out of time"
        finally:
            process.kill()
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    rows = list(_rows(text))
    (output / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "part": part.name,
        "status": status,
        "time_s": time.monotonic() - begun_s,
        "rows": rows,
        "last_line": (text.strip().splitlines() or [""])[-1][:300],
    }


def _rows(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut by a time limit
            # The kernels' bench prints all of its cases in one line.
            yield from (each for each in row.get("results", [row]) if "case" in each)
