"""The parts of a check: the command of each, its time limit, and the record of its results.

    results.jsonl    every row of every part, one per line, written as it is measured
    log.txt          everything that the parts print, each line prefixed with its part's name

If a part or the whole check is interrupted, these two files hold everything measured until then.
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
# Leave out plugins that a machine may lack, and do not let warnings fail the run.
_PYTEST = (
    *("-m", "pytest", "-o", "addopts=", "-o", "filterwarnings=default", "-p", "no:cacheprovider"),
    *("-q", "-m", "gpu", "-rfE", "--tb=short", "-p", "tools.bench.pytest_rows"),
)
_TEST_LIMIT_S = 90  # per test, if the plugin for it is installed
_MAX_TEST_WORKERS = 10
_SHARED_THREADS = 1  # of processes side by side: teams that wait for each other cost far more
_NUM_SHARES = 3  # processes that share the kernels' cases
_LAST_LINES = 12  # of a failed part, for readers who see only the end of the output
_MAX_LINE_WIDTH = 160
_MIN_TIME_S = 5.0  # a part is not started with less time than this
_ABORT_GRACE_S = 2.0  # for the stack traces of a part that is out of time


@dataclass(frozen=True)
class Part:
    """One process. Its result is the JSON lines with a ``case`` that it prints."""

    name: str
    command: tuple[str, ...]  # without the interpreter
    limit_s: float
    num_threads: int | None = None  # of the host's tensor operations; None: as the library likes


def gpu_parts(options: Sequence[str], pytest: Sequence[str]) -> list[list[Part]]:
    """All parts in order of importance; the parts of a group run side by side.

    The first group checks correctness. Meanwhile the models' kernels are compiled by processes that
    measure nothing, so that later measurements need not wait for the compiler on a new machine.
    """

    def bench(name: str, module: str, limit_s: float, *more: str) -> Part:
        return Part(name, ("-m", f"tools.bench.{module}", *more, *options), limit_s)

    small, large = ("--model", "qwen3-0.6b"), ("--model", "llama-3.1-8b")
    shares = [
        Part(
            f"right {share + 1}",
            ("-m", "kernels.bench", "--json", "--check", "--share", f"{share}/{_NUM_SHARES}"),
            150,
            _SHARED_THREADS,
        )
        for share in range(_NUM_SHARES)
    ]
    return [
        [
            Part(
                "gpu tests",
                (*_PYTEST, *_parallel_test_options(), *_gpu_tests(), *pytest),
                170,
                _SHARED_THREADS,
            ),
            bench("warm-up 0.6b", "warm_up", 150, *small),
            bench("warm-up 8b", "warm_up", 150, *large),
            bench("warm-up invariant 0.6b", "warm_up", 150, "--batch-invariant", *small),
            bench("warm-up invariant 8b", "warm_up", 150, "--batch-invariant", *large),
            bench("warm-up int4 8b", "warm_up", 150, "--quantization", "int4", *large),
            bench("warm-up fp8 8b", "warm_up", 150, "--quantization", "fp8", *large),
            *shares,
        ],
        [bench("steps 0.6b", "steps", 60, *small)],
        [bench("throughput", "throughput", 50, *small)],
        [bench("steps 8b", "steps", 90, *large)],
        [bench("first answer", "first_answer", 50, *small)],
        [Part("kernels", ("-m", "kernels.bench", "--json"), 90)],
        [bench("invariant 0.6b", "steps", 45, "--batch-invariant", *small)],
        [bench("invariant 8b", "steps", 60, "--batch-invariant", *large)],
        [bench("int4 8b", "steps", 50, "--quantization", "int4", *large)],
        [bench("fp8 8b", "steps", 50, "--quantization", "fp8", *large)],
        [Part("adapters 0.6b", ("-m", "tools.bench.lora", "qwen3-0.6b", "--device", "cuda"), 60)],
        [bench("breakdown 0.6b", "breakdown", 40, *small)],
        [bench("breakdown 8b", "breakdown", 40, *large)],
        # Last: it has needed more than its time.
        [bench("transformers", "transformers_peer", 70, *small)],
    ]


def tiny_parts(options: Sequence[str]) -> list[list[Part]]:
    """The same benches on a shape that a CPU runs in seconds."""
    modules = ("warm_up", "steps", "throughput", "first_answer", "breakdown", "transformers_peer")
    return [
        [Part(module, ("-m", f"tools.bench.{module}", "--model", "tiny", *options), 100)]
        for module in modules
    ]


def _gpu_tests() -> list[str]:
    """The files that hold GPU tests; others would import everything that server tests need."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


def _parallel_test_options() -> list[str]:
    """Options for several pytest processes and a limit per test, if the plugins are installed.

    Most of the time of these tests is spent compiling.
    """
    options: list[str] = []
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", str(max(1, min(_MAX_TEST_WORKERS, (os.cpu_count() or 1) - 2)))]
    if importlib.util.find_spec("pytest_timeout") is not None:
        # A signal would not interrupt a wait for a kernel.
        options += ["--timeout", str(_TEST_LIMIT_S), "--timeout-method", "thread"]
    return options


class ResultLog:
    """The files of a check's results. Lines of concurrent parts are not interleaved.

    Args:
        output: the folder, created if missing.
    """

    def __init__(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self._log: TextIO = (output / "log.txt").open("w", encoding="utf-8")
        self._rows: TextIO = (output / "results.jsonl").open("w", encoding="utf-8")
        self._lock = threading.Lock()

    def write_line(self, part: str, line: str) -> dict[str, Any] | None:
        """Record a line that a part has printed, and return its row if it holds one."""
        row = _row(line)
        with self._lock:
            self._log.write(f"[{part}] {line}\n")
            self._log.flush()
            if row is not None:
                self._rows.write(json.dumps({"part": part, **row}) + "\n")
                self._rows.flush()
        return row

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        self._rows.close()


def run_parts(parts: Sequence[Part], record: ResultLog, left_s: float) -> list[dict[str, Any]]:
    """Run parts side by side; return the rows of each, as far as it got, and how it ended.

    Args:
        parts: the parts of one group.
        record: where their output is recorded.
        left_s: seconds until all must have ended, regardless of their own limits.
    """
    if left_s < _MIN_TIME_S:
        return [_part_result(part, "not begun: no time was left", 0.0, [], []) for part in parts]
    running: list[_Running] = []
    try:
        running += [_Running(part, record, min(part.limit_s, left_s)) for part in parts]
        for each in running:
            each.wait()
    finally:  # also if this process is told to stop
        for each in running:
            each.end()
    return [each.result() for each in running]


class _Running:
    """A running part, and a thread that reads its output."""

    def __init__(self, part: Part, record: ResultLog, limit_s: float) -> None:
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
            # PYTHONFAULTHANDLER: on SIGABRT, all threads print their stacks.
            env=_environment(part),
            process_group=0,  # its children end with it
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> None:
        """Wait until the part ends or its time is over; then request the stacks of its threads."""
        try:
            self._status = self._process.wait(max(0.0, self._ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._status, self._is_over = "out of time", True
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGABRT)
                self._process.wait(_ABORT_GRACE_S)

    def end(self) -> None:
        """Kill the part and all its children."""
        with contextlib.suppress(ProcessLookupError):  # if all have exited
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_MIN_TIME_S)

    def result(self) -> dict[str, Any]:
        """The result as :func:`run_parts` returns it."""
        time_s = self._ended_s - self._begun_s
        return _part_result(self._part, self._status, time_s, self._rows, list(self._lines))

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            for line in printed:
                if not (line := line.rstrip()):
                    continue
                row = self._record.write_line(self._part.name, line)
                if row is None:
                    if not self._is_over:  # later rows go to the log only
                        self._lines.append(line[:_MAX_LINE_WIDTH])
                else:
                    self._rows.append(row)
        self._ended_s = time.monotonic()


def _environment(part: Part) -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if part.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(part.num_threads)
    return environment


def _part_result(
    part: Part, status: int | str, time_s: float, rows: list[dict[str, Any]], lines: list[str]
) -> dict[str, Any]:
    """Assemble the result of a part."""
    return {
        "part": part.name,
        "status": status,
        "time_s": round(time_s, 1),
        "rows": rows,
        "last_lines": lines,
    }


def _row(line: str) -> dict[str, Any] | None:
    """The row in a line; None if there is none or it was cut off by a time limit."""
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if "case" in row else None
