"""Refuses weights that do not fit into a CPU's memory before they are read.

The kernel would kill the process when it has read most of them.
"""

from __future__ import annotations

from engine.errors import ModelLoadError
from engine.memory import free_host_bytes, free_swap_bytes
from engine.models.loader import weights_bytes
from engine.runner.device import dtype_name
from engine.runner.load_plan import LoadPlan


def check_weights_fit(plan: LoadPlan) -> None:
    """Raise ModelLoadError if this rank's weights exceed the free memory.

    Only the size of dense weights is known exactly. Those of a quantised checkpoint, or to be
    quantised, are not checked, and neither is what is needed beside the weights. Other ranks check
    their own: how much of theirs is in memory already is not known here.
    """
    config, attention = plan.config, plan.attention
    if attention.device.type != "cpu" or plan.has_codes:
        return
    needed = weights_bytes(plan.spec, attention.dtype)
    free = free_host_bytes() + free_swap_bytes()
    if needed > free:
        raise ModelLoadError(
            f"{config.model}: the weights take {needed / 2**20:,.0f} MiB in "
            f"{dtype_name(attention.dtype)}, {free / 2**20:,.0f} MiB of memory are free; "
            f"--quantization int8 or int4 takes {_fraction(attention.dtype.itemsize)}"
        )


def _fraction(itemsize: int) -> str:
    return "a half or a quarter of it" if itemsize == 2 else "a quarter or an eighth of it"
