"""The tensors behind the KV blocks; ``sizing.py`` plans how many there are.

Each layer has its keys and values in [num_blocks, num_kv_heads, block_size, head_dim]. The slots of
one head in one block are contiguous, so a decode kernel reads each (block, head) tile in one run,
and a gather of whole tiles yields [heads, slots, head_dim], ready for batched products.

A quantised cache (``kernels/reference/cache_quantisation.py``) also has a scale for each slot and
head, [num_blocks, num_kv_heads, block_size]. Layers with an indexer also have their index keys,
[num_blocks, 1, block_size, index_dim]. Whatever is done with a block is done with these too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.errors import ModelLoadError
from engine.models.layer_state import HybridMemory, LayerMemory, LayerState
from engine.models.spec import DecoderSpec
from kernels.attention import LayerCache
from kernels.cpu.memory import mapped_zeros

SCALE_DTYPE = torch.float32


class KVCache:
    """What all layers store: keys and values in blocks allocated by the ``BlockPool``, or states.

    Attributes:
        num_blocks, block_size: of each layer that has blocks.
        paged: these layers.
        layers: all layers, for a forward pass.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        codes: torch.dtype | None = None,
        states: Sequence[LayerState] = (),
        *,
        interleave_layers: bool = False,
    ) -> None:
        """Allocate all blocks, zeroed.

        With ``codes``, blocks hold codes of that type with scales instead of ``dtype``. ``states``
        are those of the layers without blocks. With ``interleave_layers``, a block's data of all
        layers is contiguous, in huge pages if the system grants them, for kernels that expect this.
        With separate layers, a huge page for each would take more memory than a small cache has.

        Raises:
            ModelLoadError: the device has too little memory.
        """
        self.num_blocks, self.block_size = num_blocks, block_size
        try:
            self.paged = _paged(
                spec, num_blocks, block_size, dtype, device, codes, interleave_layers
            )
        except (RuntimeError, MemoryError, OSError) as error:
            size = num_blocks * block_size * bytes_per_token(spec, dtype, codes)
            reason = str(error).splitlines()[0]
            raise ModelLoadError(
                f"a KV cache of {size / 2**20:,.0f} MiB does not fit {device}: {reason}"
            ) from None
        self.layers = tuple(_in_order(spec, self.paged, states))

    def tensors(self) -> list[torch.Tensor]:
        """All block storage, layer by layer; the first dimension of each tensor is the block."""
        return [tensor for layer in self.paged for tensor in layer.tensors()]


def bytes_per_token(spec: DecoderSpec, dtype: torch.dtype, codes: torch.dtype | None) -> int:
    """The size of a token's keys and values in all layers, scales included."""
    if codes is None:
        return spec.kv_bytes_per_token(dtype.itemsize)
    scales = 2 * sum(heads for heads, _ in spec.cached_heads) * SCALE_DTYPE.itemsize
    return spec.kv_bytes_per_token(codes.itemsize) + scales


def _in_order(
    spec: DecoderSpec, paged: Sequence[LayerCache], states: Sequence[LayerState]
) -> list[LayerMemory]:
    """The storage of each layer on this rank; a layer that reads another's has that one's."""
    blocks, lines = iter(paged), iter(states)
    found: list[LayerMemory] = []
    for layer in spec.layers:
        if layer.kv_sharing_layer is not None:
            found.append(found[layer.kv_sharing_layer - spec.first_layer])
        elif layer.hybrid:
            found.append(HybridMemory(next(blocks), next(lines)))
        else:
            found.append(next(lines) if layer.recurrent else next(blocks))
    return found


def _paged(
    spec: DecoderSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    codes: torch.dtype | None,
    interleave_layers: bool,
) -> tuple[LayerCache, ...]:
    """One cache per layer that has blocks; layers with equal heads are allocated together."""
    made = {
        (heads, head_dim): _allocate_alike(
            spec,
            spec.cached_heads.count((heads, head_dim)),
            (num_blocks, heads, block_size, head_dim),
            dtype,
            device,
            codes,
            interleave_layers,
        )
        for heads, head_dim in dict.fromkeys(spec.cached_heads)
    }
    paged = (next(made[heads]) for heads in spec.cached_heads)
    return tuple(
        cache._replace(
            index_keys=zeros((num_blocks, 1, block_size, index_dim), codes or dtype, device)
        )
        if index_dim
        else cache
        for cache, index_dim in zip(paged, spec.index_dims, strict=True)
    )


def _allocate_alike(
    spec: DecoderSpec,
    count: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    codes: torch.dtype | None,
    interleave_layers: bool,
) -> Iterator[LayerCache]:
    if spec.value_dim is not None:
        for keys in _allocate_separate(count, shape, codes or dtype, device):
            yield LayerCache(keys, keys[..., : spec.value_dim])
        return
    make = _allocate_interleaved if interleave_layers else _allocate_separate
    stored = make(2 * count, shape, codes or dtype, device)
    scales = [] if codes is None else make(2 * count, shape[:-1], SCALE_DTYPE, device)
    for i in range(0, 2 * count, 2):
        yield LayerCache(*stored[i : i + 2], *scales[i : i + 2])


def _allocate_separate(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    return [zeros(shape, dtype, device) for _ in range(count)]


def _allocate_interleaved(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """As ``_allocate_separate``, on a CPU: block i of each tensor follows block i of the one before
    it."""
    assert device.type == "cpu"
    return list(mapped_zeros((shape[0], count, *shape[1:]), dtype).unbind(1))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros; on a CPU lazily, so that pages take memory when first written.

    numpy requests zeroed pages (calloc), whereas torch would write the zeros itself, which takes
    seconds and gigabytes at start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
