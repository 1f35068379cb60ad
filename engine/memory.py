"""Current memory usage of the device and the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch


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
    return min(_machine_bytes(), _control_group_bytes())


def _machine_bytes() -> int:
    """Memory that the system reports as available, reclaimable page cache included."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_group_bytes() -> int:
    """What is left of a container's limit (control groups v2, then v1); huge if there is none."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return 2**63 - 1
