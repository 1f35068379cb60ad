"""Linear layers on a CPU with quantised weights, read as they are, in panels.

Memory use is that of the codes; see ``native/panels/groups.h`` for layout and arithmetic.
"""

from __future__ import annotations

import math

import torch

from kernels.cpu.bindings import DTYPE_CODES, function
from kernels.cpu.linear import (
    PANEL,
    PanelKind,
    PanelLinear,
    Panels,
    arena,
    num_bytes,
    pointers,
    round_up,
)
from kernels.packed import PackedWeight

_STEP = 32  # the number of inputs is padded to a multiple of it
_WORD_INPUTS = {4: 8, 8: 4}  # by bits


def refuse(weight: PackedWeight) -> str | None:
    """Return why the kernel cannot hold a weight, or None if it can."""
    if weight.num_groups > 1 and weight.group_size % _WORD_INPUTS[weight.bits]:
        return f"groups of {weight.group_size} inputs"
    return None


class PanelGrouped(PanelLinear):
    """Codes of 4 or 8 bits in groups with scales and optional zeros; activations in bfloat16.

    Scales are stored in float16, relative to a power of two for the whole weight, so that none is
    too large, and only those 2 ** 29 times smaller than the largest lose precision. Levels are
    stored in bfloat16.

    Args:
        weight: one that ``refuse`` accepts.
        bias: [outputs] or None.
        dtype: of the model.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        step = math.lcm(weight.group_size, _STEP) if weight.num_groups > 1 else _STEP
        super().__init__(weight.shape, bias, step, dtype)
        outputs, columns = weight.shape
        self._group = weight.group_size if weight.num_groups > 1 else self._inputs
        panels = round_up(outputs, PANEL) // PANEL
        words = self._inputs // _WORD_INPUTS[weight.bits]
        self._packed = arena.empty((panels, words, PANEL), torch.int32)
        pack = "quire_nibbles_pack" if weight.bits == 4 else "quire_bytes_pack"
        codes = weight.codes.contiguous()
        sizes = (outputs, columns, self._inputs)
        getattr(self._library, pack)(codes.data_ptr(), *sizes, self._packed.data_ptr())
        self._is_float = weight.codes.dtype == torch.float8_e4m3fn
        self._factor = _next_power_of_two(weight.scales) / 2**15
        self._scales = self._in_panels(weight.scales.float() / self._factor, torch.float16)
        self._zeros = None
        if weight.zeros is not None:
            self._zeros = self._in_panels(weight.zeros, torch.float16)
        self._levels = None
        if weight.levels is not None:
            self._levels = torch.tensor(weight.levels * 2, dtype=torch.bfloat16)
        self._order = None
        if weight.order is not None:
            self._order = weight.order.to(torch.int32).contiguous()
            self._padding = 0  # the kernel pads as it reorders
        self._product = "quire_grouped"
        self._weight_args = (
            *self._parts(),
            *(columns, self._group, self._factor, self._is_float),
            *pointers(self._bias),
        )

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return num_bytes(self._packed, self._scales, self._zeros, self._order, self._bias)

    def panels(self) -> Panels:
        """See ``PanelLinear``."""
        kind: PanelKind = "float8" if self._is_float else "bytes"
        return Panels(
            "nibbles" if self._levels is not None else kind,
            *self._sizes,
            self._packed,
            self._bias,
            scales=self._scales,
            zeros=self._zeros,
            levels=self._levels,
            order=self._order,
            group_size=self._group,
            factor=self._factor,
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [n] of the weight, as an embedding table: [n, inputs]."""
        dtype = self._dtype if self._dtype in DTYPE_CODES else torch.float32
        ids = ids.contiguous()
        found = torch.empty((len(ids), self._columns), dtype=dtype)
        function("quire_grouped_rows")(
            DTYPE_CODES[dtype],
            *self._parts(),
            *(self._group, self._factor, self._is_float),
            *(ids.data_ptr(), len(ids), self._inputs, self._columns),
            found.data_ptr(),
        )
        return found if dtype is self._dtype else found.to(self._dtype)

    def _parts(self) -> tuple[int | None, ...]:
        return pointers(self._packed, self._scales, self._zeros, self._levels, self._order)

    def _in_panels(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[outputs, groups] -> [panels, groups, 32], padded with zeros."""
        outputs, groups = values.shape
        panels = self._packed.shape[0]
        padded = torch.zeros((panels * PANEL, self._inputs // self._group), dtype=dtype)
        padded[:outputs, :groups] = values
        return padded.view(panels, PANEL, -1).transpose(1, 2).contiguous()


def _next_power_of_two(scales: torch.Tensor) -> float:
    """Return the least power of two above all scales."""
    largest = float(scales.float().abs().max())
    return 2.0 ** math.frexp(largest)[1] if largest > 0 else 1.0
