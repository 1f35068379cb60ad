"""Recorded programs: a step's native calls as one list that a single call runs.

A function that computes by native calls is *run dry*: each call is noted with the addresses of its
operands, and nothing is computed. Torch operations of the function may create or view tensors, in a
workspace that the program keeps, and copy, add and multiply them
(``kernels/cpu/recordable_ops.py``); anything else cannot be recorded, and is refused by name. A run
gives the same numbers as the
function, without any Python between two calls: it is the CPU's counterpart of a CUDA graph.

Programs of the same workspace share its memory, so they never run at once, and what one leaves
there is read before another runs.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu.bindings import SIGNATURES, RecordCall, call_recorder
from kernels.cpu.memory import mapped_zeros
from kernels.cpu.native import build
from kernels.cpu.recordable_ops import OpRecorder, record_op

_CHUNK_BYTES = 64 * 2**20
_LINE_BYTES = 64
_aten = torch.ops.aten

_ResultT = TypeVar("_ResultT")


class NotRecordableError(Exception):
    """The function does something that cannot be recorded; the message names it."""


class Program:
    """A sequence of native calls.

    Args:
        calls: of functions by name, with the arguments that ``function`` takes.
    """

    def __init__(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        library = build.open_library()
        self._recorded: tuple[Any, ...] = tuple(calls)  # keeps structures alive
        words = [list(map(_word, SIGNATURES[name], arguments)) for name, arguments in calls]
        flat = np.array([word for line in words for word in line], np.uint64)
        begins = np.cumsum([0, *map(len, words)])[:-1] * flat.itemsize + flat.ctypes.data
        functions = [_address(library, f"{name}_words") for name, _ in calls]
        self._words = flat
        self._calls = np.stack((np.array(functions, np.uint64), begins.astype(np.uint64)), axis=1)
        self._run: Any = library.quire_run
        self._run.argtypes, self._run.restype = (ctypes.c_void_p, ctypes.c_int64), None

    @classmethod
    def joined(cls, programs: Sequence[Program]) -> Program:
        """Join at least one program into one that runs them in order."""
        made = cls(())
        made._recorded = tuple(programs)
        made._calls = np.concatenate([each._calls for each in programs])
        return made

    def __len__(self) -> int:
        """Number of calls."""
        return len(self._calls)

    def __add__(self, other: Program) -> Program:
        """Return a program that runs both in order."""
        return Program.joined((self, other))

    def __call__(self) -> None:
        """Compute what was recorded, from the operands' current contents."""
        # This call makes torch apply its number of threads to the thread that runs the step.
        torch.get_num_threads()
        self._run(self._calls.ctypes.data, len(self._calls))


class Workspace:
    """Memory for the tensors of programs; it grows, and pages are committed when first written."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []

    def chunk(self, index: int, least_bytes: int) -> np.ndarray:
        """Return chunk ``index``, uint8, allocating it if it is the next one.

        Raises:
            OSError: the system is out of memory.
        """
        if index == len(self._chunks):
            size = max(least_bytes, _CHUNK_BYTES)
            self._chunks.append(mapped_zeros((size,), torch.uint8).numpy())
        return self._chunks[index]


class Recorder:
    """Records functions whose programs run in the order of their recording.

    Args:
        workspace: memory for their tensors; tensors still referenced after one function are not
            overwritten by the next.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._allocator = _WorkspaceAllocator(workspace)

    def __call__(self, function: Callable[[], _ResultT]) -> tuple[Program, _ResultT]:
        """Return the program of ``function`` and what it returned: tensors that will hold the
        results.

        Nothing is computed now.

        Raises:
            NotRecordableError: it does more than native calls.
        """
        calls: list[tuple[str, tuple[Any, ...]]] = []

        def note(name: str, arguments: tuple[Any, ...]) -> None:
            calls.append((name, arguments))

        token = call_recorder.set(note)
        try:
            with _DryRun(self._allocator, note):
                result = function()
        finally:
            call_recorder.reset(token)
        return Program(calls), result


class _WorkspaceAllocator:
    """Tracks which parts of a workspace the tensors of one recorder use."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._free: list[list[tuple[int, int]]] = []  # by chunk: (begin, end), in order

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the first free place, occupied as long as the tensor is referenced."""
        size = int(np.prod(shape)) * dtype.itemsize
        taken = max(_LINE_BYTES, -(-size // _LINE_BYTES) * _LINE_BYTES)
        index, begin = self._allocate(taken)
        piece = self._workspace.chunk(index, taken)[begin : begin + size]
        weakref.finalize(piece, self._release, index, begin, begin + taken)
        return torch.from_numpy(piece).view(dtype).view(tuple(shape))

    def _allocate(self, size: int) -> tuple[int, int]:
        for index, free in enumerate(self._free):
            for place, (begin, end) in enumerate(free):
                if end - begin >= size:
                    free[place : place + 1] = [(begin + size, end)] if end - begin > size else []
                    return index, begin
        index = len(self._free)
        chunk_bytes = len(self._workspace.chunk(index, size))
        self._free.append([(0, chunk_bytes)])
        return self._allocate(size)

    def _release(self, index: int, begin: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for span in sorted([*self._free[index], (begin, end)]):
            if merged and merged[-1][1] == span[0]:
                span = (merged.pop()[0], span[1])
            merged.append(span)
        self._free[index] = merged


class _DryRun(TorchDispatchMode):
    """Makes tensors in the workspace, and prevents computation."""

    def __init__(self, layout: _WorkspaceAllocator, note: RecordCall) -> None:
        super().__init__()
        self._allocator = layout
        self._recorder = OpRecorder(layout.empty, note)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch would import its compiler, which takes seconds, to exclude it from the
        # method below.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle an operation of the function; called by torch."""
        options = kwargs or {}
        if func is _aten.empty.memory_format:
            dtype = options.get("dtype") or torch.get_default_dtype()
            return self._allocator.empty(args[0], dtype)
        if func is _aten.new_empty.default:
            return self._allocator.empty(args[1], options.get("dtype") or args[0].dtype)
        if func is _aten.empty_like.default and args[0].is_contiguous():
            return self._allocator.empty(args[0].shape, options.get("dtype") or args[0].dtype)
        with self:  # in inference mode, composite operations arrive whole
            made = func.decompose(*args, **options)
        if made is not NotImplemented:
            return made
        if func.is_view:
            return func(*args, **options)
        held = record_op(self._recorder, func, args, options)
        if held is None:
            raise NotRecordableError(f"{func} is no native kernel")
        return held


def _word(kind: type, argument: Any) -> int:
    """Encode an argument in eight bytes, as native/program.h reads it."""
    if argument is None:
        return 0
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", argument), "little")
    if not isinstance(argument, int):  # ctypes.byref
        return ctypes.addressof(argument._obj)
    return argument & (2**64 - 1)


@functools.cache
def _address(library: ctypes.CDLL, name: str) -> int:
    found = getattr(library, name, None)
    if found is None:
        raise NotRecordableError(f"{name} is not among the native functions")
    address = ctypes.cast(found, ctypes.c_void_p).value
    assert address is not None
    return address
