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

from kernels.cpu.memory import Arena
from kernels.cpu.native import build
from kernels.reference.quantised import LEVELS

logger = logging.getLogger(__name__)

INT4_GROUP = 32  # inputs that share a scale

_PANEL = 32  # outputs of a panel, as in native/tiles.h
_arena = Arena()
_POINTER, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool


class _PanelLinear:
    """What the three have in common. ``step``: a multiple of it is how many inputs are held."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, step: int) -> None:
        self._outputs, self._columns = weight.shape
        self._inputs = _round_up(self._columns, step)
        self._padding = self._inputs - self._columns
        self._bias = None if bias is None else bias.float()
        self._dtype = weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs]."""
        rows = x.to(torch.bfloat16)
        if self._padding:
            rows = functional.pad(rows, (0, self._padding))
        rows = rows.contiguous()
        y = torch.empty((rows.shape[0], self._outputs), dtype=torch.bfloat16)
        self._compute(rows, y)
        return y.to(x.dtype)

    def _compute(self, x: torch.Tensor, y: torch.Tensor) -> None:
        raise NotImplementedError


class PanelDense(_PanelLinear):
    """Weights in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, 32)
        library, self._amx = _library()
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        self._packed = _arena.empty(
            (_round_up(outputs, _PANEL) // _PANEL, self._inputs // 2, _PANEL, 2), torch.bfloat16
        )
        library.quire_dense_pack(
            weight.data_ptr(), outputs, columns, self._inputs, self._packed.data_ptr()
        )
        self._product = library.quire_dense

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return _num_bytes(self._packed, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n] of the weight, as a table of embeddings is read: [n, inputs]."""
        found = self._packed[ids // _PANEL, :, ids % _PANEL]
        return found.view(len(ids), self._inputs)[:, : self._columns].to(self._dtype).contiguous()

    def _compute(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._product(
            x.data_ptr(),
            x.shape[0],
            self._inputs,
            self._packed.data_ptr(),
            _pointer(self._bias),
            y.data_ptr(),
            self._outputs,
            self._amx,
        )


class PanelInt8(_PanelLinear):
    """Weights rounded to int8, one scale an output; activations to eight bits, row by row."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, 64)
        library, self._amx = _library()
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        self._scales = torch.empty(outputs)
        self._totals = torch.empty(outputs, dtype=torch.int32)  # of an output's codes
        self._packed = _arena.empty(
            (_round_up(outputs, _PANEL) // _PANEL, self._inputs // 4, _PANEL, 4), torch.int8
        )
        library.quire_int8_pack(
            weight.data_ptr(),
            outputs,
            columns,
            self._inputs,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._totals.data_ptr(),
        )
        self._product = library.quire_int8

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return _num_bytes(self._packed, self._scales, self._totals, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [n] of the weight, as a table of embeddings is read: [n, inputs]."""
        codes = self._packed[ids // _PANEL, :, ids % _PANEL].view(len(ids), self._inputs)
        return (codes[:, : self._columns] * self._scales[ids, None]).to(self._dtype)

    def _compute(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._product(
            x.data_ptr(),
            x.shape[0],
            self._inputs,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._totals.data_ptr(),
            _pointer(self._bias),
            y.data_ptr(),
            self._outputs,
            self._amx,
        )


class PanelInt4(_PanelLinear):
    """Weights rounded to sixteen levels in groups of 32 inputs; activations in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, INT4_GROUP)
        library, self._amx = _library()
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        panels = _round_up(outputs, _PANEL) // _PANEL
        # Zeros where the last panel has no outputs.
        self._scales = torch.zeros(
            (panels, self._inputs // INT4_GROUP, _PANEL), dtype=torch.float16
        )
        self._packed = _arena.empty((panels, self._inputs // 8, _PANEL), torch.int32)
        library.quire_int4_pack(
            weight.data_ptr(),
            outputs,
            columns,
            self._inputs,
            INT4_GROUP,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
        )
        self._levels = torch.tensor(LEVELS * 2, dtype=torch.bfloat16)
        self._product = library.quire_int4

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return _num_bytes(self._packed, self._scales, self._bias)

    def _compute(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._product(
            x.data_ptr(),
            x.shape[0],
            self._inputs,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._levels.data_ptr(),
            INT4_GROUP,
            _pointer(self._bias),
            y.data_ptr(),
            self._outputs,
            self._amx,
        )


def is_available() -> bool:
    """Whether these can be made here; if not, the log says why."""
    library = build.load()
    if library is not None and not hasattr(library, "quire_dense"):
        logger.info("no native linear layers: the processor lacks AVX-512 with BF16 and VNNI")
        return False
    return library is not None


@functools.cache
def _library() -> tuple[ctypes.CDLL, bool]:
    """The library, its functions declared, and whether it may use AMX.

    Raises:
        RuntimeError: it is not to be had; ``is_available`` tells that before.
    """
    library = build.load()
    if library is None:
        raise RuntimeError("the native CPU kernels are not available")
    size = (_POINTER, _COUNT, _COUNT)  # activations, rows, inputs
    result = (_POINTER, _POINTER, _COUNT, _FLAG)  # bias, y, outputs, AMX
    pack = (_POINTER, _COUNT, _COUNT, _COUNT)  # weight, outputs, columns, inputs
    signatures = {
        "quire_dense": (*size, _POINTER, *result),
        "quire_dense_pack": (*pack, _POINTER),
        "quire_int8": (*size, _POINTER, _POINTER, _POINTER, *result),
        "quire_int8_pack": (*pack, _POINTER, _POINTER, _POINTER),
        "quire_int4": (*size, _POINTER, _POINTER, _POINTER, _COUNT, *result),
        "quire_int4_pack": (*pack, _COUNT, _POINTER, _POINTER),
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library, bool(library.quire_has_amx())


def _num_bytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
