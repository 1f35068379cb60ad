"""How full the device is, measured now."""

from __future__ import annotations

import contextlib
import ctypes
import os

import msgspec


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the device that a model runs on; 0 where the system does not tell."""

    used_bytes: int  # of a GPU: by everybody; of a CPU: by this process
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


def trim() -> None:
    """Give memory that the process has freed back to the system, where its allocator can."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
