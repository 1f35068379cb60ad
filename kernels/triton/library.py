"""Batch-invariant products of many rows by the library, where its bits are our kernel's.

A library chooses its kernel by the number of rows, and some of its kernels split the inputs. Those
that do not sum as ``matmul.py`` does: one accumulator for an element, and matrix instructions that
take its inputs in order, 16 at a time. With many rows they are faster. No manual promises that a
shape gets one of them, so when a weight is loaded it is tried with a few numbers of rows. Any batch
is cut into rows of these numbers, and a rest that our kernel multiplies:

    rows 0 to 4095          to 4607         to 5000
    [ library, 4096 ][ library, 512 ][ ours, 393 ]

For the same shape, alignment and settings a library chooses the same kernel again. The settings of
the trial are therefore those of every product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kernels.triton.launch import INTERPRETED
from kernels.triton.matmul import invariant_linear

logger = logging.getLogger(__name__)

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Writes x [n, inputs] W^T + b to output [n, outputs].
WriteProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]

TRIED_ROWS = (8192, 4096, 2048, 1024, 512, 256)
_COMPARED_ROWS = 1024  # at once
# Results for each number of rows, at least. Of those in bfloat16 another order of summation changes
# about one in a thousand, since most of what it changes is rounded away.
_COMPARED = 1 << 18
# Of inputs and outputs, in bytes: the library looks at no more than this.
_ALIGNMENT = 256


class LibraryProducts:
    """Chooses for each weight how many rows at a time the library may multiply.

    Args:
        ours: the product whose bits count.
        write: the library's.
    """

    def __init__(self, ours: Product = invariant_linear, write: WriteProduct | None = None) -> None:
        self._ours, self._write = ours, write or _write_product
        self._proven: dict[tuple[object, ...], tuple[int, ...]] = {}

    def product_for(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """Return a weight's product: the same bits as ``ours`` in any batch.

        Args:
            weight: [outputs, inputs] with its numbers; tried once for each shape and alignment.
            bias: [outputs] or None; likewise.
        """
        if weight.dtype.itemsize != 2 or INTERPRETED:
            return self._ours
        # The library's choice depends on the bias' address, too.
        places = _alignment(weight), None if bias is None else _alignment(bias)
        kind = weight.shape, weight.dtype, weight.stride(), places
        if kind not in self._proven:
            self._proven[kind] = self.prove(weight, bias)
        sizes = self._proven[kind]
        if not sizes:
            return self._ours

        def product(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            return self.multiply(x, weight, bias, sizes)

        return product

    def prove(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tried: Sequence[int] = TRIED_ROWS,
    ) -> tuple[int, ...]:
        """Return those of the numbers ``tried`` for which the library's product has our bits.

        Magnitudes of inputs vary, so that another order of summation shows. A weight that makes
        mostly zeros proves nothing. Numbers of rows that cannot be tried are not used.
        """
        outputs, inputs = weight.shape
        sizes = torch.logspace(-3, 1, inputs, device=weight.device)
        sizes = sizes[torch.randperm(inputs, device=weight.device)]

        def has_our_bits(rows: int) -> bool:
            x = torch.randn(rows, inputs, device=weight.device) * sizes
            x = x.to(weight.dtype)
            theirs = x.new_empty(rows, outputs)
            self._write(x, weight, bias, theirs)
            for begin in range(0, rows, _COMPARED_ROWS):
                part = slice(begin, begin + _COMPARED_ROWS)
                ours = self._ours(x[part], weight, bias)
                if not torch.equal(ours.view(torch.int16), theirs[part].view(torch.int16)):
                    return False
                if 2 * int(ours.count_nonzero()) < ours.numel():
                    return False
            return True

        proven = []
        for rows in tried:
            try:
                if all(has_our_bits(rows) for _ in range(0, _COMPARED, rows * outputs)):
                    proven.append(rows)
            # Too little memory, or a library without this choice.
            except RuntimeError as error:
                logger.debug("products of %d rows: not by the library, %s", rows, error)
        told = ", ".join(map(str, proven)) or "no number of"
        logger.info("products of %s rows x %d x %d: by the library", told, inputs, len(weight))
        return tuple(sorted(proven, reverse=True))

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sizes: Sequence[int],
    ) -> torch.Tensor:
        """Multiply x [n, inputs] in parts of ``sizes`` rows, largest first; ours gets the rest."""
        rows = x.shape[0]
        if rows < sizes[-1] or not x.is_contiguous() or _alignment(x) < _ALIGNMENT:
            return self._ours(x, weight, bias)
        output = x.new_empty(rows, weight.shape[0])
        begin = 0
        for size in sizes:
            while rows - begin >= size:
                part = slice(begin, begin + size)
                self._write(x[part], weight, bias, output[part])
                begin += size
        if begin < rows:
            output[begin:] = self._ours(x[begin:], weight, bias)
        return output


def _write_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor
) -> None:
    with _unsplit(x.dtype):
        if bias is None:
            torch.mm(x, weight.t(), out=output)
        else:
            torch.addmm(bias, x, weight.t(), out=output)


@contextmanager
def _unsplit(dtype: torch.dtype) -> Iterator[None]:
    """Let the library choose only among kernels that sum an element's inputs in one place.

    Raises:
        RuntimeError: this torch has no library with this choice.
    """
    settings = torch.backends.cuda.matmul
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    name = f"allow_{kind}_reduced_precision_reduction"
    kept = getattr(settings, name), getattr(settings, f"{name}_split_k")
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        setattr(settings, name, (False, False))
        yield
    finally:
        setattr(settings, name, kept)
        torch.backends.cuda.preferred_blas_library(library)


def _alignment(tensor: torch.Tensor) -> int:
    """Return the largest power of two, at most ``_ALIGNMENT``, that divides a tensor's address."""
    address = tensor.data_ptr() | _ALIGNMENT
    return address & -address
