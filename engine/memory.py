"""Current memory usage of the device and the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    import torch

_UNLIMITED = 2**63 - 1


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the device that a model runs on, in bytes; 0 if the system does not report it."""

    used_bytes: int  # GPU: by all processes; CPU: by this process
    total_bytes: int


def device_memory(device: str) -> DeviceMemory:
    """Memory of ``device`` ("cpu", "cuda" or "cuda:0")."""
    if device.startswith("cuda"):
        import torch

        free, total = torch.cuda.mem_get_info(torch.device(device))
        return DeviceMemory(used_bytes=total - free, total_bytes=total)
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * page
    except OSError:
        resident = 0
    return DeviceMemory(used_bytes=resident, total_bytes=os.sysconf("SC_PHYS_PAGES") * page)


def available_bytes(device: torch.device) -> int:
    """Memory that could be allocated now, on the GPU or on this machine and its control group."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


def trim_heap() -> None:
    """Return memory that the process has freed to the system, if its allocator can."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def free_host_bytes() -> int:
    """Memory that could be allocated now, within this machine and this process's control group."""
    return min(_meminfo("MemAvailable") or _physical_bytes(), _control_group_bytes())


def free_swap_bytes() -> int:
    """Swap space that is free on this machine; a control group may be allowed less of it."""
    return _meminfo("SwapFree") or 0


def _meminfo(name: str) -> int | None:
    """One of the system's figures, in bytes. MemAvailable includes reclaimable page cache."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _GroupFiles(NamedTuple):
    """Names of a control group's files, and of the figures of pages that it could give back."""

    limit: str
    usage: str
    inactive: str
    active: str
    mapped: str


_V1 = _GroupFiles(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "total_mapped_file",
)
_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file", "active_file", "file_mapped")


def _control_group_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """What is left of the limits of this process's group and those above it; huge without any.

    In a container the group is mostly the root of what can be seen. A service's is below it.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    by_memory = next((path for names, path in own.items() if "memory" in names.split(",")), "/")
    return min(
        _left_of_limits(root, own.get("", "/"), _V2),
        _left_of_limits(root / "memory", by_memory, _V1),
    )


def _left_of_limits(top: Path, path: str, files: _GroupFiles) -> int:
    """The least that is left in the group ``path`` and in those above it, up to ``top``."""
    group = top / path.lstrip("/")
    left = _UNLIMITED
    for directory in (group, *group.parents):
        left = min(left, _left_of_limit(directory, files))
        if directory == top:
            break
    return left


def _left_of_limit(directory: Path, files: _GroupFiles) -> int:
    try:
        limit = int((directory / files.limit).read_text())
        usage = int((directory / files.usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not there, or "max"
        return _UNLIMITED
    # Pages of files count as used, those of a checkpoint that has been read among them, but are
    # given back before memory is short.
    of_files = int(stat.get(files.inactive, 0)) + int(stat.get(files.active, 0))
    reclaimable = max(0, of_files - int(stat.get(files.mapped, 0)))
    return max(0, limit - max(0, usage - reclaimable))
