"""Refuses weights that do not fit into the memory of a CPU or GPU before they are read.

The kernel would kill the process when it has read most of them, and a GPU's allocator would fail.
"""

from __future__ import annotations

from engine.errors import ModelLoadError
from engine.memory import device_memory, free_host_bytes, free_swap_bytes
from engine.models.loader import weights_bytes
from engine.runner.device import dtype_name
from engine.runner.load_plan import LoadPlan


def check_weights_fit(plan: LoadPlan) -> None:
    """Raise ModelLoadError if this rank's weights exceed a CPU's free memory, or a GPU's memory.

    Only the size of dense weights is known exactly. Those of a quantised checkpoint, or to be
    quantised, are not checked, and neither is what is needed beside the weights. Other ranks check
    their own: how much of theirs is in memory already is not known here. Nor is how much a GPU
    could make free: one that shares the host's memory counts cached files as used.
    """
    config, attention = plan.config, plan.attention
    if plan.has_codes:
        return
    needed = weights_bytes(plan.spec, attention.dtype)
    if attention.device.type == "cpu":
        room = free_host_bytes() + free_swap_bytes()
        told = f"{room / 2**20:,.0f} MiB of memory are free"
    else:
        room = device_memory(str(attention.device)).total_bytes
        told = f"the GPU {attention.device} has {room / 2**20:,.0f} MiB"
    if needed > room:
        raise ModelLoadError(
            f"{config.model}: the weights take {needed / 2**20:,.0f} MiB in "
            f"{dtype_name(attention.dtype)}, {told}; "
            f"--quantization int8 or int4 takes {_fraction(attention.dtype.itemsize)}"
        )


def _fraction(itemsize: int) -> str:
    return "a half or a quarter of it" if itemsize == 2 else "a quarter or an eighth of it"
