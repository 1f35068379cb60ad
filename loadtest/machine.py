"""The machine a figure was measured on, and the CPU time that processes spent.

Names the hardware and the versions; no host name, user or path.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "transformers", "msgspec", "fastapi", "uvicorn", "uvloop")


def describe_machine() -> dict[str, Any]:
    """CPU model, cores that may be used, memory, system and library versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name))},
    }


def tree_cpu_s(pid: int) -> float | None:
    """CPU seconds that a process and its living descendants have used; None where unknown."""
    tick = os.sysconf("SC_CLK_TCK")
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended since it was listed
        child, parent = int(entry.name), int(fields[1])
        children.setdefault(parent, []).append(child)
        spent[child] = (int(fields[11]) + int(fields[12])) / tick
    if pid not in spent:
        return None
    total, pending = 0.0, [pid]
    while pending:
        current = pending.pop()
        total += spent.get(current, 0.0)
        pending += children.get(current, ())
    return total


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _memory_gib() -> float | None:
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return round(pages / 2**30, 1)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
