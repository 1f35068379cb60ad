"""The parts of a check: what each runs, how long at most, and what is kept of it as it comes.

    results.jsonl    every row of every part, a line each, written when it was measured
    log.txt          all that the parts print, each line behind the name of its part

Whatever ends a part or the whole check, what was measured until then lies in these two files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

_ROOT = Path(__file__).resolve().parents[2]
# What a machine for a check need not have (plugins) or what must not end it (warnings) is left out.
_PYTEST = (
    *("-m", "pytest", "-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider"),
    *("-q", "-m", "gpu", "-rfE", "--tb=short", "-p", "tools.bench.pytest_rows"),
)
_TEST_LIMIT_S = 90  # where a plugin can end a test
_MOST_TESTERS = 6
_NUM_SHARES = 3  # processes that check the kernels' cases
_LAST_LINES = 12  # of a part that failed, for whoever sees no more than the end of the output
_MOST_WIDE = 160
_LEAST_S = 5.0  # a part that has less is not begun
_LAST_WORDS_S = 2.0  # for where it stands, of a part that is out of time


@dataclass(frozen=True)
class Part:
    """One process. What it prints as JSON lines with a ``case`` is its result."""

    name: str
    command: tuple[str, ...]  # after the interpreter
    limit_s: float


def gpu_parts(options: Sequence[str], pytest: Sequence[str]) -> list[list[Part]]:
    """Everything, what matters most first; the parts of a group run side by side.

    First whether all is right. The models' kernels are compiled meanwhile, by processes that
    measure nothing, so that those that do need not wait for the compiler on a machine that has
    never run them.
    """

    def bench(name: str, module: str, limit_s: float, *more: str) -> Part:
        return Part(name, ("-m", f"tools.bench.{module}", *more, *options), limit_s)

    small, large = ("--model", "qwen3-0.6b"), ("--model", "llama-3.1-8b")
    shares = [
        Part(
            f"right {share + 1}",
            ("-m", "kernels.bench", "--json", "--check", "--share", f"{share}/{_NUM_SHARES}"),
            150,
        )
        for share in range(_NUM_SHARES)
    ]
    return [
        [
            Part("gpu tests", (*_PYTEST, *_testers(), *_gpu_tests(), *pytest), 170),
            bench("warm-up 0.6b", "warm_up", 150, *small),
            bench("warm-up 8b", "warm_up", 150, *large),
            *shares,
        ],
        [bench("steps 0.6b", "steps", 60, *small)],
        [bench("throughput", "throughput", 50, *small)],
        [bench("steps 8b", "steps", 90, *large)],
        [bench("first answer", "first_answer", 50, *small)],
        [Part("kernels", ("-m", "kernels.bench", "--json"), 90)],
        [bench("breakdown", "breakdown", 40, *small)],
        [bench("transformers", "transformers_peer", 70, *small)],
        [bench("invariant 0.6b", "steps", 45, "--batch-invariant", *small)],
        [bench("invariant 8b", "steps", 60, "--batch-invariant", *large)],
    ]


def tiny_parts(options: Sequence[str]) -> list[list[Part]]:
    """The same benches on a shape that a CPU runs in seconds."""
    modules = ("warm_up", "steps", "throughput", "first_answer", "breakdown", "transformers_peer")
    return [
        [Part(module, ("-m", f"tools.bench.{module}", "--model", "tiny", *options), 100)]
        for module in modules
    ]


def _gpu_tests() -> list[str]:
    """The files that hold tests of a GPU: others would need all that those of servers import."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


def _testers() -> list[str]:
    """Several processes of pytest, most of whose time is the compiler's, and a limit for each test:
    where the plugins for it are there."""
    options: list[str] = []
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(max(1, min(_MOST_TESTERS, (os.cpu_count() or 1) - 2)))]
    if importlib.util.find_spec("pytest_timeout") is not None:
        # A signal would not end what waits for a kernel.
        options += ["--timeout", str(_TEST_LIMIT_S), "--timeout-method", "thread"]
    return options


class Record:
    """The files of a check's results; lines of several parts at once are whole.

    Args:
        output: a folder, made where it is missing.
    """

    def __init__(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._log: TextIO = (output / "log.txt").open("w", encoding="utf-8")
        self._rows: TextIO = (output / "results.jsonl").open("w", encoding="utf-8")
        self._lock = threading.Lock()

    def note(self, part: str, line: str) -> dict[str, Any] | None:
        """Keep what a part has printed; the row, if it is one."""
        row = _row(line)
        with self._lock:
            self._log.write(f"[{part}] {line}\n")
            self._log.flush()
            if row is not None:
                self._rows.write(json.dumps({"part": part, **row}) + "\n")
                self._rows.flush()
        return row

    def close(self) -> None:
        """No more comes."""
        self._log.close()
        self._rows.close()


def run_parts(parts: Sequence[Part], record: Record, left_s: float) -> list[dict[str, Any]]:
    """Run some parts side by side; of each its rows, as far as it came, and how it ended.

    Args:
        parts: of one group.
        record: keeps what they print.
        left_s: until all must have ended, whatever their own limits.
    """
    if left_s < _LEAST_S:
        return [_told(part, "not begun: no time was left", 0.0, [], []) for part in parts]
    running: list[_Running] = []
    try:
        running += [_Running(part, record, min(part.limit_s, left_s)) for part in parts]
        for each in running:
            each.wait()
    finally:  # also where whoever waits is told to stop
        for each in running:
            each.end()
    return [each.result() for each in running]


class _Running:
    """A part under way, and a thread that reads what it prints."""

    def __init__(self, part: Part, record: Record, limit_s: float) -> None:
        self._part, self._record = part, record
        self._begun_s = self._ended_s = time.monotonic()
        self._ends_s = self._begun_s + limit_s
        self._status: int | str = "ended early"
        self._rows: list[dict[str, Any]] = []
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._is_over = False
        self._process = subprocess.Popen(
            [sys.executable, *part.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=_ROOT,
            # The second: SIGABRT has all threads tell where they stand.
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
            process_group=0,  # its own children end with it
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> None:
        """Until it has ended, or its time is over: then it tells where it stands, if it can."""
        try:
            self._status = self._process.wait(max(0.0, self._ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._status, self._is_over = "out of time", True
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGABRT)
                self._process.wait(_LAST_WORDS_S)

    def end(self) -> None:
        """Nothing of it is left afterwards."""
        with contextlib.suppress(ProcessLookupError):  # where all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_LEAST_S)

    def result(self) -> dict[str, Any]:
        """See ``run_parts``."""
        time_s = self._ended_s - self._begun_s
        return _told(self._part, self._status, time_s, self._rows, list(self._lines))

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            for line in printed:
                if not (line := line.rstrip()):
                    continue
                row = self._record.note(self._part.name, line)
                if row is None:
                    if not self._is_over:  # what comes then is for the log
                        self._lines.append(line[:_MOST_WIDE])
                else:
                    self._rows.append(row)
        self._ended_s = time.monotonic()


def _told(
    part: Part, status: int | str, time_s: float, rows: list[dict[str, Any]], lines: list[str]
) -> dict[str, Any]:
    """The result of a part."""
    return {
        "part": part.name,
        "status": status,
        "time_s": round(time_s, 1),
        "rows": rows,
        "last_lines": lines,
    }


def _row(line: str) -> dict[str, Any] | None:
    """A line's row; None where it is none, or was cut by a time limit."""
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if "case" in row else None
