"""The memory of the host tier, and the copies between it and the device.

A slot holds everything that belongs to a block (every layer's keys, values and scales, those of a
draft model, and a draft head's features) contiguously:

    device   layer 0 [blocks]   layer 1 [blocks]   ...         a slot   | layer 0 | layer 1 | ... |
                  └───── gathered ─────┴──────────► stage ──────► one copy a block

On a GPU the compute stream fills the stage, after which it may overwrite the blocks. A second
stream copies the stage to page-locked memory. Loads are copied and scattered by the compute stream,
because the step that requested them reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from engine.errors import ModelLoadError
from engine.kv_cache.storage import zeros
from engine.types import BlockCopy
from kernels.transfer import to_device

# Device memory for staging blocks to and from the host; at least one block.
STAGE_BYTES = 32 * 2**20

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class HostStore:
    """Slots for whole blocks. The ``HostTier`` decides which slot holds what.

    Args:
        tensors: the blocks' storage, each [num_blocks, ...], all on one device; a block of each is
            contiguous.
        num_slots: number of slots.

    Raises:
        ModelLoadError: the host has too little memory, or cannot page-lock it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_slots: int) -> None:
        word = _word([tensor[0].nbytes for tensor in tensors])
        self._parts = [tensor.view(tensor.shape[0], -1).view(word) for tensor in tensors]
        bounds = accumulate((part.shape[1] for part in self._parts), initial=0)
        self._places = list(pairwise(bounds))  # of the parts within a slot
        width = self._places[-1][1]
        self._device = device = tensors[0].device
        self._slots = _slots(num_slots, width, word, device)  # [num_slots, width]
        self._stage_blocks = max(1, min(num_slots, STAGE_BYTES // (width * word.itemsize)))
        shape = (self._stage_blocks, width)
        self._offload_stages = _Stages(shape, word, device)
        self._load_stage = torch.empty(shape, dtype=word, device=device)

    @property
    def num_bytes(self) -> int:
        """The size of all slots."""
        return self._slots.nbytes

    def exchange(self, offloads: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Copy blocks to slots, then slots to blocks."""
        for pairs in _batches(offloads, self._stage_blocks):
            self._offload(pairs)
        if loads:
            self._offload_stages.wait()
        for pairs in _batches(loads, self._stage_blocks):
            self._load(pairs)

    def _offload(self, pairs: Sequence[BlockCopy]) -> None:
        blocks = self._indices([block for block, _ in pairs])
        stage = self._offload_stages.next()
        for part, (begin, end) in zip(self._parts, self._places, strict=True):
            stage[: len(pairs), begin:end] = part.index_select(0, blocks)
        with self._offload_stages:
            for place, (_, slot) in enumerate(pairs):
                self._slots[slot].copy_(stage[place], non_blocking=True)

    def _load(self, pairs: Sequence[BlockCopy]) -> None:
        stage, blocks = self._load_stage, self._indices([block for _, block in pairs])
        for place, (slot, _) in enumerate(pairs):
            stage[place].copy_(self._slots[slot], non_blocking=True)
        for part, (begin, end) in zip(self._parts, self._places, strict=True):
            part.index_copy_(0, blocks, stage[: len(pairs), begin:end])

    def _indices(self, blocks: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(blocks), self._device)


class _Stages:
    """Two alternating stages, and the stream that empties them; on a CPU there are no streams.

    As a context manager it makes that stream current, ordered after all work already submitted to
    the previous one.
    """

    def __init__(self, shape: tuple[int, int], word: torch.dtype, device: torch.device) -> None:
        self._stages = [torch.empty(shape, dtype=word, device=device) for _ in range(2)]
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._emptied = [torch.cuda.Event() for _ in self._stages]
            self._context = torch.cuda.stream(self._stream)

    def next(self) -> torch.Tensor:
        """The stage for the current stream to fill next."""
        self._turn = 1 - self._turn
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._emptied[self._turn])
        return self._stages[self._turn]

    def wait(self) -> None:
        """Make the current stream wait until all stages are empty."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._context.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._stream is not None:
            self._emptied[self._turn].record()
            self._context.__exit__(*raised)


def _slots(num_slots: int, width: int, word: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate the slots; with a GPU page-locked, so that copies are asynchronous."""
    num_bytes = num_slots * width * word.itemsize
    problem = f"{num_bytes / 2**20:,.0f} MiB of the host's memory for KV blocks: "
    try:
        slots = zeros((num_slots, width), word, torch.device("cpu"))
    except MemoryError:
        raise ModelLoadError(f"{problem}there is not so much") from None
    if device.type == "cuda":
        # pin_memory is not used, because it rounds up to a power of two.
        cuda = torch.cuda.cudart()
        assert cuda is not None
        try:
            torch.cuda.check_error(cuda.cudaHostRegister(slots.data_ptr(), num_bytes, 0))
        except RuntimeError as error:
            raise ModelLoadError(f"{problem}it cannot be locked: {error}") from None
        freed = weakref.finalize(slots, cuda.cudaHostUnregister, slots.data_ptr())
        freed.atexit = False
    return slots


def _word(sizes: Sequence[int]) -> torch.dtype:
    """The widest integer type that divides all these block sizes in bytes.

    Gathering single bytes would be slow.
    """
    return next(word for word in _WORDS if not any(size % word.itemsize for size in sizes))


def _batches(pairs: Sequence[BlockCopy], size: int) -> Iterator[Sequence[BlockCopy]]:
    for first in range(0, len(pairs), size):
        yield pairs[first : first + size]
