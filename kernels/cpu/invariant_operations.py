"""The CPU kernels as one set, except attention, for results with the same bits in any batch."""

from kernels.cpu import lora
from kernels.cpu.operations import *  # noqa: F403

add_adapters = lora.invariant_adapters
