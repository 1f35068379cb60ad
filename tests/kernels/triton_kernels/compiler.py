"""A process that compiles kernels for a GPU. It takes seconds to start: one for many tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]

# Returns the reports of the launches of the named cases, or of all; see ``aot.py``.
CompileCases = Callable[..., list[dict[str, Any]]]


@contextmanager
def compiler(home: Path, *options: str) -> Iterator[CompileCases]:
    """Start the process, which keeps its cache in the folder ``home``; options as of ``aot.py``."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with (
        (home / "log").open("w+") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.triton_kernels.aot", *options],
            cwd=_ROOT,
            env={**env, "PYTHONPATH": str(_ROOT), "TRITON_CACHE_DIR": str(home / "cache")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def compiled(folder: Path, *names: str) -> list[dict[str, Any]]:
            print(json.dumps([str(folder), names]), file=asked, flush=True)
            reports = []
            while (line := told.readline()) != "\n":
                assert line, (home / "log").read_text()[-4000:]
                reports.append(json.loads(line))
            return reports

        yield compiled
        asked.close()
