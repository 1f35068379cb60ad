"""A bfloat16 head that finds the likeliest token by reading half of its memory.

With one sequence, a step takes as long as loading its weights, and most weights of a small model
are the head's: 8 of 13 million parameters in a model with 32,000 tokens. The weight is therefore
also held in eight bits. The codes bound all scores, and only the few panels that may contain the
largest one are then read in bfloat16. The token is the same as from the whole product, bit for bit;
``kernels/cpu/native/panels/screened.cpp`` has the inequality.

With many sequences, a product is bound by its multiplications, and a processor that multiplies
bytes twice as fast as bfloat16 benefits from the codes as well.
"""

from __future__ import annotations

import sys

import torch

from kernels.cpu.linear import PANEL, PanelDense, arena, num_bytes, pointers, round_up
from kernels.cpu.native.build import target_name
from kernels.sampling import SamplerOutput

_LANES = 16
# Products with more rows are bound by arithmetic, not by reading the weight.
_MAX_ROWS = 8
_FAST_INT8_TARGET = "avx512"  # and those twice as fast as bfloat16; of the others none was measured


class ScreenedHead(PanelDense):
    """A weight [outputs, inputs] in bfloat16, and its codes."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight, None)
        weight = weight.to(torch.bfloat16).contiguous()
        outputs, columns = weight.shape
        panels, width = round_up(outputs, PANEL) // PANEL, round_up(self._inputs, 64)
        self._codes = arena.empty((panels, width // 4, PANEL, 4), torch.int8)
        self._scales = torch.empty(outputs)
        self._totals = torch.empty(outputs, dtype=torch.int32)
        self._slacks, self._norms = torch.empty(2, round_up(panels, _LANES))
        self._max_rows = sys.maxsize if target_name() == _FAST_INT8_TARGET else _MAX_ROWS
        # Remaining calls without screening, and the number for the next failure.
        self._backoff = torch.tensor((0, 1), dtype=torch.int32)
        given, scales = weight.data_ptr(), self._scales.data_ptr()
        self._library.quire_int8_pack(
            *(given, outputs, columns, width, self._codes.data_ptr(), scales),
            self._totals.data_ptr(),
        )
        self._library.quire_screen_slacks(
            *(given, outputs, columns, scales, self._slacks.data_ptr(), self._norms.data_ptr())
        )
        self._parts = (
            *(self._codes, self._scales, self._totals),
            *(self._slacks, self._norms, self._backoff),
        )
        self._screen = pointers(self._packed, *self._parts)

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return super().num_bytes + num_bytes(*self._parts)

    def sample_greedy(
        self, x: torch.Tensor, scale: float = 1.0, cap: float | None = None
    ) -> SamplerOutput:
        """See ``PanelHead``."""
        if len(x) > self._max_rows:
            return super().sample_greedy(x, scale, cap)
        return self._sample_greedy("quire_screened_likeliest", self._screen, x, scale, cap)
