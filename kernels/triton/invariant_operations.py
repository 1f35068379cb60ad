"""The Triton kernels as one set, for results with the same bits however a text is cut."""

from kernels.triton import moe, recurrent, routing
from kernels.triton.operations import *  # noqa: F403

channel_scan = recurrent.channel_scan
fused_moe = moe.invariant_moe
gated_delta = recurrent.gated_delta
route = routing.invariant_route
selective_scan = recurrent.selective_scan
