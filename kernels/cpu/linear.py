"""Linear layers on a CPU with AVX-512 or AMX: weights held once, in panels, for any number of rows.

Each class takes a weight [outputs, inputs] and a bias [outputs] or None, and computes
``x W^T + b`` for [n, inputs]. It computes in bfloat16; other dtypes are cast on the way in and
out. Layouts and arithmetic are told in ``kernels/cpu/native``. A row of a dense or an int8 product
has the same bits alone and in a crowd.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch
from torch.nn import functional

from kernels.cpu.calls import COUNT, DTYPE_CODES, POINTER, function
from kernels.cpu.memory import Arena
from kernels.cpu.native import build
from kernels.reference.quantised import LEVELS

logger = logging.getLogger(__name__)

INT4_GROUP = 32  # inputs that share a scale

_PANEL = 32  # outputs of a panel, as in native/tiles.h
_arena = Arena()


class _PanelLinear:
    """What the three have in common. ``step``: a multiple of it is how many inputs are held."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, step: int) -> None:
        self._outputs, self._columns = weight.shape
        self._inputs = _round_up(self._columns, step)
        self._padding = self._inputs - self._columns
        self._bias = None if bias is None else bias.float()
        self._dtype = weight.dtype
        self._library, self._amx = _library()
        self._product: str  # of the native functions
        self._held: tuple[int | None, ...]  # addresses of the weight's parts, then of the bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs]."""
        y = self._compute(x, torch.bfloat16)
        return y if x.dtype is torch.bfloat16 else y.to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs] in float32, the sums as they are."""
        return self._compute(x, torch.float32)

    def _compute(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.dtype is not torch.bfloat16:
            x = x.to(torch.bfloat16)
        if self._padding:
            x = functional.pad(x, (0, self._padding))
        x = x.contiguous()
        num_rows = x.shape[0]
        y = torch.empty((num_rows, self._outputs), dtype=dtype)
        function(self._product)(
            x.data_ptr(),
            num_rows,
            self._inputs,
            *self._held,
            y.data_ptr(),
            self._outputs,
            dtype is torch.float32,
            self._amx,
        )
        return y

    def _rows(self, name: str, ids: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        """Rows of the weight in the model's dtype: ids [n] -> [n, columns]."""
        dtype = self._dtype if self._dtype in DTYPE_CODES else torch.float32
        ids = ids.contiguous()
        found = torch.empty((len(ids), self._columns), dtype=dtype)
        function(name)(
            DTYPE_CODES[dtype],
            *_pointers(*parts),
            *(ids.data_ptr(), len(ids), self._inputs, self._columns),
            found.data_ptr(),
        )
        return found if dtype is self._dtype else found.to(self._dtype)


class PanelDense(_PanelLinear):
    """Weights in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, 32)
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        self._packed = _arena.empty(
            (_round_up(outputs, _PANEL) // _PANEL, self._inputs // 2, _PANEL, 2), torch.bfloat16
        )
        self._library.quire_dense_pack(
            weight.data_ptr(), outputs, columns, self._inputs, self._packed.data_ptr()
        )
        self._product = "quire_dense"
        self._held = _pointers(self._packed, self._bias)

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return _num_bytes(self._packed, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n] of the weight, as a table of embeddings is read: [n, inputs]."""
        return self._rows("quire_dense_rows", ids, self._packed)


class PanelInt8(_PanelLinear):
    """Weights rounded to int8, one scale an output; activations to eight bits, row by row."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, 64)
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        self._scales = torch.empty(outputs)
        self._totals = torch.empty(outputs, dtype=torch.int32)  # of an output's codes
        self._packed = _arena.empty(
            (_round_up(outputs, _PANEL) // _PANEL, self._inputs // 4, _PANEL, 4), torch.int8
        )
        self._library.quire_int8_pack(
            weight.data_ptr(),
            outputs,
            columns,
            self._inputs,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._totals.data_ptr(),
        )
        self._product = "quire_int8"
        self._held = _pointers(self._packed, self._scales, self._totals, self._bias)

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return _num_bytes(self._packed, self._scales, self._totals, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n] of the weight, as a table of embeddings is read: [n, inputs]."""
        return self._rows("quire_int8_rows", ids, self._packed, self._scales)


class PanelInt4(_PanelLinear):
    """Weights rounded to sixteen levels in groups of 32 inputs; activations in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, INT4_GROUP)
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        panels = _round_up(outputs, _PANEL) // _PANEL
        # Zeros where the last panel has no outputs.
        self._scales = torch.zeros(
            (panels, self._inputs // INT4_GROUP, _PANEL), dtype=torch.float16
        )
        self._packed = _arena.empty((panels, self._inputs // 8, _PANEL), torch.int32)
        self._library.quire_int4_pack(
            weight.data_ptr(),
            outputs,
            columns,
            self._inputs,
            INT4_GROUP,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
        )
        self._levels = torch.tensor(LEVELS * 2, dtype=torch.bfloat16)
        self._product = "quire_int4"
        packed, scales, levels, bias_at = _pointers(
            self._packed, self._scales, self._levels, self._bias
        )
        self._held = packed, scales, levels, INT4_GROUP, bias_at

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return _num_bytes(self._packed, self._scales, self._bias)


def is_available() -> bool:
    """Whether these can be made here; if not, the log says why."""
    library = build.load()
    if library is not None and not hasattr(library, "quire_dense"):
        logger.info("no native linear layers: the processor lacks AVX-512 with BF16 and VNNI")
        return False
    return library is not None


@functools.cache
def _library() -> tuple[ctypes.CDLL, bool]:
    """The library, the functions that pack weights declared, and whether it may use AMX.

    Raises:
        RuntimeError: it is not to be had; ``is_available`` tells that before.
    """
    library = build.load()
    if library is None:
        raise RuntimeError("the native CPU kernels are not available")
    pack = (POINTER, COUNT, COUNT, COUNT)  # weight, outputs, columns, inputs
    signatures = {
        "quire_dense_pack": (*pack, POINTER),
        "quire_int8_pack": (*pack, POINTER, POINTER, POINTER),
        "quire_int4_pack": (*pack, COUNT, POINTER, POINTER),
    }
    for name, arguments in signatures.items():
        packing = getattr(library, name)
        packing.argtypes, packing.restype = arguments, None
    return library, bool(library.quire_has_amx())


def _num_bytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _pointers(*tensors: torch.Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
