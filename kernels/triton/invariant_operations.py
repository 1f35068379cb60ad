"""The triton kernels as one set, for results with the same bits however a text is cut."""

from kernels.triton.operations import *  # noqa: F403
from kernels.triton.recurrent import gated_delta, selective_scan  # noqa: F401
from kernels.triton.routing import invariant_route as route  # noqa: F401
