"""The CPU kernels as one set, for results with the same bits in any batch; but for attention."""

from kernels.cpu import lora
from kernels.cpu.operations import *  # noqa: F403

add_adapters = lora.invariant_adapters
