"""Linear layers on a CPU with AMX, AVX-512 or AVX2: weights in panels, for any number of rows.

Each class takes a weight [outputs, inputs] and a bias [outputs] or None, and computes ``x W^T + b``
for [n, inputs]. Activations and results are in bfloat16; other dtypes are cast on the way in and
out. Layouts and arithmetic are described in ``kernels/cpu/native``. In a dense or int8 product, a
row has the same bits alone and in any batch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from kernels.cpu.bindings import CODE, COUNT, DTYPE_CODES, GATING_CODES, POINTER, REAL, function
from kernels.cpu.memory import Arena
from kernels.cpu.native import build
from kernels.moe import GatedActivation, GatedActivationKind
from kernels.packed import INT4_LEVELS, PackedWeight
from kernels.reference.quantised import INT4_GROUP_SIZE
from kernels.sampling import SamplerOutput

logger = logging.getLogger(__name__)

PANEL = 32  # outputs of a panel, as in native/panels/tiles.h
arena = Arena()


PanelKind = Literal["dense", "int8", "nibbles", "bytes", "float8"]


class Panels(NamedTuple):
    """A weight in its layer's format, for other native code that multiplies by it."""

    kind: PanelKind
    outputs: int
    columns: int
    inputs: int  # columns, padded with zeros
    packed: torch.Tensor
    bias: torch.Tensor | None  # [outputs] float32
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    code_sums: torch.Tensor | None = None
    levels: torch.Tensor | None = None
    order: torch.Tensor | None = None
    group_size: int = 1
    factor: float = 1.0


class _Gating(ctypes.Structure):
    """``GatedActivation`` of native/gating.h."""

    _fields_ = (("kind", CODE), ("alpha", REAL), ("limit", REAL))


class PanelLinear(ABC):
    """The common base of all linear layers here.

    Args:
        shape: of the weight, [outputs, inputs].
        bias: [outputs] or None.
        step: the number of inputs is padded to a multiple of it.
        dtype: of the model.
    """

    def __init__(
        self, shape: tuple[int, int], bias: torch.Tensor | None, step: int, dtype: torch.dtype
    ) -> None:
        self._outputs, self._columns = shape
        self._inputs = round_up(self._columns, step)
        self._sizes = (self._outputs, self._columns, self._inputs)
        self._padding = self._inputs - self._columns
        self._bias = None if bias is None else bias.float()
        self._dtype = dtype
        self._library, self._amx = _library()
        self._product: str  # name of the native function
        # Addresses of the weight's parts, then of the bias.
        self._weight_args: tuple[int | float | None, ...]

    @abstractmethod
    def panels(self) -> Panels:
        """Return the weight in its stored format."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs]."""
        y = self._compute(x, torch.bfloat16)
        return y if x.dtype is torch.bfloat16 else y.to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs] in float32, unrounded."""
        return self._compute(x, torch.float32)

    def forward_gated(self, x: torch.Tensor, gating: GatedActivation) -> torch.Tensor:
        """Return ``gating(self(x))``, bit for bit: [n, inputs] -> [n, outputs / 2].

        This is the first product of an MLP. If the gate's outputs are whole panels it takes a
        single pass, which writes less than half as much.
        """
        if self._outputs % (2 * PANEL) or x.dtype is not torch.bfloat16:
            return gating(self(x))
        return self._compute(x, torch.bfloat16, gating)

    def _prepare_input(self, x: torch.Tensor) -> torch.Tensor:
        """Convert to the native functions' input: [n, columns] -> [n, inputs]."""
        if x.dtype is not torch.bfloat16:
            x = x.to(torch.bfloat16)
        if self._padding:
            x = functional.pad(x, (0, self._padding))
        return x.contiguous()

    def _compute(
        self, x: torch.Tensor, dtype: torch.dtype, gating: GatedActivation | None = None
    ) -> torch.Tensor:
        x = self._prepare_input(x)
        num_rows = x.shape[0]
        width = self._outputs if gating is None else self._outputs // 2
        y = torch.empty((num_rows, width), dtype=dtype)
        function(self._product)(
            x.data_ptr(),
            num_rows,
            self._inputs,
            *self._weight_args,
            y.data_ptr(),
            self._outputs,
            dtype is torch.float32,
            None if gating is None else _gating(gating.kind, gating.alpha, gating.limit),
            self._amx,
        )
        return y

    def _rows(self, name: str, ids: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight in the model's dtype: ids [n] -> [n, columns]."""
        dtype = self._dtype if self._dtype in DTYPE_CODES else torch.float32
        ids = ids.contiguous()
        found = torch.empty((len(ids), self._columns), dtype=dtype)
        function(name)(
            DTYPE_CODES[dtype],
            *pointers(*parts),
            *(ids.data_ptr(), len(ids), self._inputs, self._columns),
            found.data_ptr(),
        )
        return found if dtype is self._dtype else found.to(self._dtype)


class PanelHead(PanelLinear):
    """A head that finds its likeliest outputs without storing all of them."""

    def sample_greedy(
        self, x: torch.Tensor, scale: float = 1.0, cap: float | None = None
    ) -> SamplerOutput:
        """Return the largest of each row of ``logits(x)``, scaled and capped.

        They are multiplied by ``scale`` above 0, and then capped as by
        ``kernels.reference.layers.softcap``. A row is not finite if its largest logit is infinite,
        or any is nan.
        """
        return self._sample_greedy(f"{self._product}_likeliest", self._weight_args, x, scale, cap)

    def _sample_greedy(
        self, name: str, held: tuple[Any, ...], x: torch.Tensor, scale: float, cap: float | None
    ) -> SamplerOutput:
        x = self._prepare_input(x)
        token_ids = torch.empty(len(x), dtype=torch.int64)
        is_finite = torch.empty(len(x), dtype=torch.bool)
        function(name)(
            *(x.data_ptr(), len(x), self._inputs, *held, self._outputs, scale, cap or 0.0),
            *(self._amx, token_ids.data_ptr(), is_finite.data_ptr()),
        )
        return SamplerOutput(token_ids, is_finite)


class PanelDense(PanelHead):
    """Weights in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), bias, 32, weight.dtype)
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        self._packed = arena.empty(
            (round_up(outputs, PANEL) // PANEL, self._inputs // 2, PANEL, 2), torch.bfloat16
        )
        self._library.quire_dense_pack(
            weight.data_ptr(), outputs, columns, self._inputs, self._packed.data_ptr()
        )
        self._product = "quire_dense"
        self._weight_args = pointers(self._packed, self._bias)

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return num_bytes(self._packed, self._bias)

    def panels(self) -> Panels:
        """See ``PanelLinear``."""
        return Panels("dense", *self._sizes, self._packed, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [n] of the weight, as an embedding table: [n, inputs]."""
        return self._rows("quire_dense_rows", ids, self._packed)


class PanelInt8(PanelHead):
    """Weights in int8 with one scale per output; activations in eight bits, row by row."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._allocate((weight.shape[0], weight.shape[1]), bias, weight.dtype)
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        self._library.quire_int8_pack(
            weight.data_ptr(),
            outputs,
            columns,
            self._inputs,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._totals.data_ptr(),
        )

    @classmethod
    def from_codes(
        cls, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PanelInt8:
        """Make one of a quantised weight: int8 from ``min_code()`` on, one scale per output,
        no zeros, no order."""
        layer = cls.__new__(cls)
        layer._allocate(weight.shape, bias, dtype)
        codes = weight.codes.contiguous()
        sizes = (*weight.shape, layer._inputs)
        layer._library.quire_bytes_pack(codes.data_ptr(), *sizes, layer._packed.data_ptr())
        layer._scales.copy_(weight.scales[:, 0])
        layer._totals.copy_(weight.codes.sum(1, dtype=torch.int32))
        return layer

    def _allocate(
        self, shape: tuple[int, int], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, bias, 64, dtype)
        outputs = shape[0]
        self._scales = torch.empty(outputs)
        self._totals = torch.empty(outputs, dtype=torch.int32)  # sums of each output's codes
        self._packed = arena.empty(
            (round_up(outputs, PANEL) // PANEL, self._inputs // 4, PANEL, 4), torch.int8
        )
        self._product = "quire_int8"
        self._weight_args = pointers(self._packed, self._scales, self._totals, self._bias)

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return num_bytes(self._packed, self._scales, self._totals, self._bias)

    def panels(self) -> Panels:
        """See ``PanelLinear``."""
        return Panels(
            "int8",
            *self._sizes,
            self._packed,
            self._bias,
            scales=self._scales,
            code_sums=self._totals,
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows [n] of the weight, as an embedding table: [n, inputs]."""
        return self._rows("quire_int8_rows", ids, self._packed, self._scales)


class PanelInt4(PanelLinear):
    """Weights in sixteen levels, activations in eight bits, both in groups of 32 inputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), bias, 64, weight.dtype)
        outputs, columns = weight.shape
        weight = weight.to(torch.bfloat16).contiguous()
        panels = round_up(outputs, PANEL) // PANEL
        # Zeros where the last panel has no outputs.
        self._scales = torch.zeros(
            (panels, self._inputs // INT4_GROUP_SIZE, PANEL), dtype=torch.float16
        )
        self._packed = arena.empty((panels, self._inputs // 8, PANEL), torch.int32)
        # Of the eight-bit codes that products with many rows make of them.
        self._int8_scales = torch.empty((panels, PANEL))
        self._totals = torch.empty((panels, PANEL), dtype=torch.int32)
        self._library.quire_int4_pack(
            weight.data_ptr(),
            outputs,
            columns,
            self._inputs,
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            self._int8_scales.data_ptr(),
            self._totals.data_ptr(),
        )
        self._levels = torch.tensor(INT4_LEVELS * 2, dtype=torch.bfloat16)
        self._product = "quire_int4"
        self._weight_args = pointers(
            self._packed, self._scales, self._int8_scales, self._totals, self._bias
        )

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        parts = self._packed, self._scales, self._int8_scales, self._totals, self._bias
        return num_bytes(*parts)

    def panels(self) -> Panels:
        """See ``PanelLinear``."""
        return Panels(
            "nibbles",
            *self._sizes,
            self._packed,
            self._bias,
            scales=self._scales,
            levels=self._levels,
            group_size=INT4_GROUP_SIZE,
        )


def is_available() -> bool:
    """Return whether these layers are available; if not, the log says why."""
    library = build.load()
    if library is not None and not hasattr(library, "quire_dense"):
        logger.info("no native linear layers: none are written for this processor")
        return False
    return library is not None


def min_code() -> int:
    """Return the least code that ``PanelInt8`` multiplies.

    It is -128, or -127 if the sum of two byte products would overflow the processor's accumulator.
    """
    return int(_library()[0].quire_least_code())


def has_amx() -> bool:
    """Return whether these layers use AMX."""
    return _library()[1]


@functools.cache
def _library() -> tuple[ctypes.CDLL, bool]:
    """Return the library, with its packing functions declared, and whether it may use AMX.

    Raises:
        RuntimeError: it is not available; ``is_available`` checks this before.
    """
    library = build.load()
    if library is None:
        raise RuntimeError("the native CPU kernels are not available")
    pack = (POINTER, COUNT, COUNT, COUNT)  # weight, outputs, columns, inputs
    signatures = {
        "quire_dense_pack": (*pack, POINTER),
        "quire_int8_pack": (*pack, POINTER, POINTER, POINTER),
        "quire_screen_slacks": (POINTER, COUNT, COUNT, POINTER, POINTER, POINTER),
        "quire_int4_pack": (*pack, *[POINTER] * 4),
        "quire_nibbles_pack": (*pack, POINTER),
        "quire_bytes_pack": (*pack, POINTER),
    }
    for name, arguments in signatures.items():
        packing = getattr(library, name)
        packing.argtypes, packing.restype = arguments, None
    return library, bool(library.quire_has_amx())


@functools.cache
def _gating(kind: GatedActivationKind, alpha: float, limit: float) -> Any:
    """Describe a gating for the native functions."""
    return ctypes.byref(_Gating(GATING_CODES[kind], alpha, limit))


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Return the total size of the tensors that are not None."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def pointers(*tensors: torch.Tensor | None) -> tuple[int | None, ...]:
    """Return the tensors' addresses; None for those that are None."""
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


def round_up(count: int, step: int) -> int:
    """Return the next multiple of ``step``."""
    return -(-count // step) * step
