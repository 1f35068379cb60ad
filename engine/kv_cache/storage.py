"""The tensors behind the KV blocks, and the plan of how many blocks there are.

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

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ModelLoadError
from engine.kv_cache.step_memory import step_bytes
from engine.limits import check_max_model_len
from engine.memory import free_host_bytes
from engine.models.layer_state import HybridMemory, LayerMemory, LayerState
from engine.models.spec import DecoderSpec
from engine.types import MemoryPlan
from kernels.attention import LayerCache
from kernels.cpu.memory import mapped_zeros

SCALE_DTYPE = torch.float32

# On a CPU, memory is shared with everything else on the machine, and cached prefixes fill whatever
# the cache is given. So it gets little, but room for one full-length sequence if possible.
_CPU_SHARE = 0.25
_CPU_DEFAULT_BYTES = 512 * 2**20
# Of those, what idle prefixes may occupy; also at least one full-length sequence.
_CPU_IDLE_BYTES = 64 * 2**20

# Blocks of a model without keys and values take no memory, but so many of them take megabytes of
# bookkeeping. They hold 2 million tokens in blocks of 16.
MAX_EMPTY_BLOCKS = 2**17

# Device memory for staging blocks to and from the host; at least one block.
STAGE_BYTES = 32 * 2**20
_NUM_STAGES = 3

# Shares of the memory left beside the weights for recurrent states and their snapshots.
STATE_SHARE = {"cuda": 0.5, "cpu": 0.25}
SNAPSHOT_SHARE = 0.05
MAX_SNAPSHOTS = 1024


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


def plan_memory(
    spec: DecoderSpec,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    block_size: int,
    max_model_len: int | None,
    dtype: torch.dtype,
    device: torch.device,
    weights_bytes: int,
    draft_bytes_per_token: int = 0,
    codes: torch.dtype | None = None,
    num_processes: int = 1,
    max_shared_bytes: int | None = None,
    lines_per_state: int = 1,
    image_bytes: int = 0,
    num_drafts: int = 0,
    has_codes: bool = False,
) -> MemoryPlan:
    """Plan the number of blocks and the maximum context. Called once the weights are loaded.

    Args:
        spec, cache, scheduler: the model and the configuration.
        block_size: tokens per block.
        max_model_len: the context asked for; None: the default.
        dtype, device: of the model.
        weights_bytes: taken by the weights.
        draft_bytes_per_token: KV size of a draft model, which has as many blocks of its own.
        codes: as in :class:`KVCache`.
        num_processes: processes that plan a cache of this size; on a CPU they share its memory.
        max_shared_bytes: limit for all of them on a CPU, weights included; None: no limit.
        lines_per_state: lines for each sequence that may have a state.
        image_bytes: needed for encoding images.
        num_drafts: most drafts of a sequence verified in one step.
        has_codes: matrices are quantised.

    Raises:
        ModelLoadError: not even one block fits, or ``max_model_len`` exceeds the model's.
    """
    check_max_model_len(max_model_len, spec.max_context_len)
    wanted_len = max_model_len or spec.default_context_len
    a_token = bytes_per_token(spec, dtype, codes) + draft_bytes_per_token
    block_bytes = a_token * block_size
    available, usual_bytes = available_bytes(device), _CPU_DEFAULT_BYTES
    if device.type == "cpu":
        available, usual_bytes = available // num_processes, usual_bytes // num_processes
        if max_shared_bytes is not None:
            available = max(0, min(available, max_shared_bytes // num_processes - weights_bytes))
    num_on_trial = min(
        scheduler.for_device(device.type).step_tokens, scheduler.max_num_seqs * (1 + num_drafts)
    )
    if device.type == "cuda":
        num_on_trial += scheduler.max_num_seqs  # those of captured steps
    trial_bytes = num_on_trial * spec.trial_bytes(dtype.itemsize) if num_drafts else 0
    available = max(0, available - image_bytes - trial_bytes)
    num_states = _num_states(spec, scheduler, dtype, device, available, lines_per_state)
    num_snapshots = 0
    if cache.enable_prefix_caching:
        num_snapshots = _num_snapshots(spec, dtype, available)
    num_lines = lines_per_state * num_states + 1 + num_snapshots
    state_bytes = num_lines * spec.state_bytes(dtype.itemsize)
    available -= state_bytes
    num_host_blocks = _host_blocks(cache, block_bytes, num_processes)
    max_idle_blocks: int | None = None
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    elif not block_bytes:  # only names of prefixes, and places in tables
        blocks_a_sequence = -(-wanted_len // block_size)
        most = max(MAX_EMPTY_BLOCKS, blocks_a_sequence)
        num_blocks = min(most, blocks_a_sequence * max(1, num_states))
    elif cache.memory_bytes is not None:
        num_blocks = cache.memory_bytes // block_bytes
    else:
        blocks_a_sequence = -(-wanted_len // block_size)
        if device.type == "cuda":
            sizes = spec, cache, scheduler, dtype, device, available
            budget = _gpu_budget(*sizes, has_codes=has_codes)
        else:
            longest_bytes = blocks_a_sequence * block_bytes
            budget = min(int(available * _CPU_SHARE), max(usual_bytes, longest_bytes))
            max_idle_blocks = max(_CPU_IDLE_BYTES, longest_bytes) // block_bytes
        num_blocks = min(budget // block_bytes, blocks_a_sequence * scheduler.max_num_seqs)
    if num_blocks < 1 and cache.memory_bytes is not None:
        raise ModelLoadError(
            f"kv_cache_memory_bytes {cache.memory_bytes:,} is too little: one block of "
            f"{block_size} tokens takes {block_bytes:,}"
        )
    if num_blocks < 1:
        raise ModelLoadError(
            f"no memory for the KV cache: one block takes {block_bytes / 2**20:,.1f} MiB, "
            f"{available / 2**20:,.0f} MiB are free beside {weights_bytes / 2**20:,.0f} of weights"
        )
    if num_blocks * block_bytes > available:
        asked = "kv_cache_memory_bytes" if cache.num_blocks is None else "num_gpu_blocks_override"
        raise ModelLoadError(
            f"{asked}: the KV cache takes {num_blocks * block_bytes / 2**20:,.0f} MiB, "
            f"{max(0, available) / 2**20:,.0f} MiB are free beside the weights"
        )
    host_bytes = num_host_blocks * block_bytes
    free = available - num_blocks * block_bytes
    on_host = free if device.type == "cpu" else free_host_bytes() // num_processes
    if host_bytes > on_host:
        raise ModelLoadError(
            f"kv_offload_bytes: {host_bytes / 2**20:,.0f} MiB requested, "
            f"{on_host / 2**20:,.0f} MiB of host memory are free"
        )
    holds = num_blocks * block_size
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_cache_bytes=num_blocks * block_bytes,
        free_bytes=max(0, free - host_bytes if device.type == "cpu" else free),
        bytes_per_token=a_token,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len or min(wanted_len, holds),
        max_idle_blocks=max_idle_blocks,
        num_host_blocks=num_host_blocks,
        host_bytes=host_bytes,
        cache_dtype=str(codes or dtype).removeprefix("torch.") if block_bytes else "",
        num_states=num_states,
        num_snapshots=num_snapshots,
        state_bytes=state_bytes,
        image_bytes=image_bytes,
        trial_bytes=trial_bytes,
    )


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


def _num_states(
    spec: DecoderSpec,
    scheduler: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
    available: int,
    lines_a_state: int,
) -> int:
    """How many sequences may have a state at once; 0 if the model has none.

    One more line is needed to pad captured batches.
    """
    each = spec.state_bytes(dtype.itemsize)
    if not each:
        return 0
    fitting = (int(available * STATE_SHARE[device.type]) // each - 1) // lines_a_state
    if fitting < 1:
        raise ModelLoadError(
            f"no memory for states: a sequence's take {each / 2**20:,.1f} MiB, "
            f"{available / 2**20:,.0f} MiB are free"
        )
    return min(scheduler.max_num_seqs, fitting)


def _num_snapshots(spec: DecoderSpec, dtype: torch.dtype, available: int) -> int:
    """How many snapshots of states are kept for prompts with a common prefix; 0 without states."""
    each = spec.state_bytes(dtype.itemsize)
    return min(MAX_SNAPSHOTS, int(available * SNAPSHOT_SHARE) // each) if each else 0


def available_bytes(device: torch.device) -> int:
    """Memory that could be allocated now, on the GPU or on this machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes()


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


def _gpu_budget(
    spec: DecoderSpec,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
    available: int,
    *,
    has_codes: bool,
) -> int:
    """The size of the cache if none was specified: what the GPU's share leaves."""
    total = torch.cuda.mem_get_info(device)[1]
    reserved = int(total * (1 - cache.memory_utilization))
    if cache.offload_bytes:
        reserved += _NUM_STAGES * STAGE_BYTES
    limits = scheduler.for_device(device.type)
    return max(0, available - reserved - step_bytes(spec, limits, dtype, has_codes=has_codes))


def _host_blocks(cache: CacheConfig, block_bytes: int, num_sharers: int) -> int:
    """How many blocks the host keeps for each of the engines that share its memory."""
    if not cache.offload_bytes:
        return 0
    if not cache.enable_prefix_caching:
        raise ModelLoadError(
            "kv_offload_bytes: blocks on the host are found by the prefix cache, which is off"
        )
    needed = num_sharers * block_bytes
    if cache.offload_bytes < needed:
        raise ModelLoadError(
            f"kv_offload_bytes: {cache.offload_bytes:,} bytes do not hold a block, which takes "
            f"{needed:,}"
        )
    return cache.offload_bytes // needed
