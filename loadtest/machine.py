"""Describes the machine of a measurement, and reads the CPU time and memory of processes.

Names the hardware and the versions, but no host name, user or path.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "transformers", "msgspec", "fastapi", "uvicorn", "uvloop")


def describe_machine() -> dict[str, Any]:
    """The CPU model, usable cores, memory, and system and library versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name))},
    }


def own_cpu_s() -> float:
    """CPU seconds used by this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tree_cpu_s(pid: int) -> float | None:
    """CPU seconds used by a process and its live descendants; None if unknown."""
    tree = process_tree(pid)
    return sum(map(cpu_s, tree)) if tree else None


def process_tree(pid: int) -> list[int]:
    """A process and its live descendants; empty if it has exited or cannot be inspected."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid] if _stat(pid) is not None else []
    for member in tree:
        tree += children.get(member, ())
    return tree


def cpu_s(pid: int) -> float:
    """CPU seconds used by one process, in ticks of 10 ms; 0 once it has exited."""
    fields = _stat(pid)
    if fields is None:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree_peak_bytes(pid: int) -> int:
    """The sum of the peak resident memory of each process of a tree.

    Shared pages count once for each process, so the sum is never too low.
    """
    return sum(map(_peak_bytes, process_tree(pid)))


def busy_cpu_s() -> float:
    """CPU seconds that this machine has been busy since boot, including hypervisor steal time."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it has exited
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


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
