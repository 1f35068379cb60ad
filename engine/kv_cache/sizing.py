"""The memory plan: how many blocks, states and snapshots there is room for.

    free memory, beside the weights
      ─ images and audio, drafts on trial     as much as they need
      ─ states and their snapshots            a share of the rest; 0 without recurrent layers
      ─ blocks                                as asked for, in blocks or bytes; otherwise
            on a GPU    what the engine's share leaves after a step's own tensors
            on a CPU    a share of the rest, but no more than is usual there
      = left free

Whatever the defaults allow, sequences never get more blocks than they could fill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ModelLoadError
from engine.kv_cache.host_store import STAGE_BYTES
from engine.kv_cache.step_memory import step_bytes
from engine.kv_cache.storage import bytes_per_token
from engine.limits import check_max_model_len
from engine.memory import available_bytes, free_host_bytes
from engine.models.spec import DecoderSpec
from engine.types import MemoryPlan

# On a CPU, memory is shared with everything else on the machine, and cached prefixes fill whatever
# the cache is given. So it gets little, but room for one full-length sequence if possible.
_CPU_SHARE = 0.25
_CPU_DEFAULT_BYTES = 512 * 2**20
# Of those, what idle prefixes may occupy; also at least one full-length sequence.
_CPU_IDLE_BYTES = 64 * 2**20

# Blocks of a model without keys and values take no memory, but so many of them take megabytes of
# bookkeeping. They hold 2 million tokens in blocks of 16.
MAX_EMPTY_BLOCKS = 2**17

_NUM_STAGES = 3  # of a ``HostStore``: two for blocks that leave, one for blocks that return

# Of a GPU's memory, what one process has beside torch's tensors, at most: its context, compiled
# kernels and what libraries need. A desktop's windows may be part of it as well.
_CONTEXT_BYTES = 1 << 30
_LEAST_FREE = 0.1  # of a GPU, whatever others have there, unless the engine's share is larger

# Shares of the memory left beside the weights for recurrent states and their snapshots.
STATE_SHARE = {"cuda": 0.5, "cpu": 0.25}
SNAPSHOT_SHARE = 0.05
MAX_SNAPSHOTS = 1024


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
    sizing = _Sizing(spec, cache, scheduler, dtype, device, num_processes, has_codes)

    trial_bytes = sizing.trial_bytes(num_drafts) if num_drafts else 0
    available = sizing.free_bytes(weights_bytes, max_shared_bytes)
    available = max(0, available - image_bytes - trial_bytes)
    num_states = sizing.num_states(available, lines_per_state)
    num_snapshots = sizing.num_snapshots(available)
    num_lines = lines_per_state * num_states + 1 + num_snapshots
    state_bytes = num_lines * spec.state_bytes(dtype.itemsize)
    available -= state_bytes
    num_host_blocks = sizing.num_host_blocks(block_bytes)
    blocks_a_sequence = -(-wanted_len // block_size)
    num_blocks, max_idle_blocks = sizing.blocks(
        available, block_bytes, blocks_a_sequence, num_states
    )
    cache_bytes, host_bytes = num_blocks * block_bytes, num_host_blocks * block_bytes
    if num_blocks < 1:
        raise sizing.no_block_error(block_bytes, block_size, available)
    sizing.check_room(available, cache_bytes, host_bytes)

    left = available - cache_bytes
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_cache_bytes=cache_bytes,
        free_bytes=max(0, left - host_bytes if device.type == "cpu" else left),
        bytes_per_token=a_token,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len or min(wanted_len, num_blocks * block_size),
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


@dataclass(frozen=True, slots=True)
class _Sizing:
    """What sizes depend on; the arguments are those of ``plan_memory``."""

    spec: DecoderSpec
    cache: CacheConfig
    scheduler: SchedulerConfig
    dtype: torch.dtype
    device: torch.device
    num_processes: int
    has_codes: bool

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def free_bytes(self, weights_bytes: int, max_shared_bytes: int | None) -> int:
        """This process's part of the free memory, and of what all of them may use."""
        free = available_bytes(self.device)
        if self.is_gpu:
            return free
        free //= self.num_processes
        if max_shared_bytes is None:
            return free
        return max(0, min(free, max_shared_bytes // self.num_processes - weights_bytes))

    def trial_bytes(self, num_drafts: int) -> int:
        """What recurrent layers keep of the drafts of a step until they have been verified."""
        limits, num_rows = self.scheduler.for_device(self.device.type), self.scheduler.max_num_seqs
        num_tokens = min(limits.step_tokens, num_rows * (1 + num_drafts))
        if self.is_gpu:
            num_tokens += num_rows  # those of captured steps
        return num_tokens * self.spec.trial_bytes(self.dtype.itemsize)

    def num_states(self, available: int, lines_a_state: int) -> int:
        """How many sequences may have a state at once; 0 if the model has none.

        One more line is needed to pad captured batches.
        """
        each = self.spec.state_bytes(self.dtype.itemsize)
        if not each:
            return 0
        fitting = (int(available * STATE_SHARE[self.device.type]) // each - 1) // lines_a_state
        if fitting < 1:
            raise ModelLoadError(
                f"no memory for states: a sequence's take {each / 2**20:,.1f} MiB, "
                f"{available / 2**20:,.0f} MiB are free"
            )
        return min(self.scheduler.max_num_seqs, fitting)

    def num_snapshots(self, available: int) -> int:
        """How many snapshots of states are kept for prompts with a common prefix."""
        each = self.spec.state_bytes(self.dtype.itemsize)
        if not each or not self.cache.enable_prefix_caching:
            return 0
        return min(MAX_SNAPSHOTS, int(available * SNAPSHOT_SHARE) // each)

    def num_host_blocks(self, block_bytes: int) -> int:
        """How many blocks the host keeps for each of the engines that share its memory."""
        cache = self.cache
        if not cache.offload_bytes:
            return 0
        if not cache.enable_prefix_caching:
            raise ModelLoadError(
                "kv_offload_bytes: blocks on the host are found by the prefix cache, which is off"
            )
        needed = self.num_processes * block_bytes
        if cache.offload_bytes < needed:
            raise ModelLoadError(
                f"kv_offload_bytes: {cache.offload_bytes:,} bytes do not hold a block, which takes "
                f"{needed:,}"
            )
        return cache.offload_bytes // needed

    def blocks(
        self, available: int, block_bytes: int, blocks_a_sequence: int, num_states: int
    ) -> tuple[int, int | None]:
        """The number of blocks, and of those that idle prefixes may occupy (see ``BlockPool``).

        ``blocks_a_sequence`` are those of a sequence of full length.
        """
        cache = self.cache
        if cache.num_blocks is not None:
            return cache.num_blocks, None
        if not block_bytes:  # only names of prefixes, and places in tables
            most = max(MAX_EMPTY_BLOCKS, blocks_a_sequence)
            return min(most, blocks_a_sequence * max(1, num_states)), None
        if cache.memory_bytes is not None:
            return cache.memory_bytes // block_bytes, None
        max_idle: int | None = None
        if self.is_gpu:
            budget = self._gpu_budget(available)
        else:
            longest_bytes = blocks_a_sequence * block_bytes
            usual_bytes = _CPU_DEFAULT_BYTES // self.num_processes
            budget = min(int(available * _CPU_SHARE), max(usual_bytes, longest_bytes))
            max_idle = max(_CPU_IDLE_BYTES, longest_bytes) // block_bytes
        fillable = blocks_a_sequence * self.scheduler.max_num_seqs
        return min(budget // block_bytes, fillable), max_idle

    def check_room(self, available: int, cache_bytes: int, host_bytes: int) -> None:
        """Raise ModelLoadError if blocks here, or those on the host, take more than is free."""
        if cache_bytes > available:
            asked = "num_gpu_blocks_override"
            if self.cache.num_blocks is None:
                asked = "kv_cache_memory_bytes"
            raise ModelLoadError(
                f"{asked}: the KV cache takes {cache_bytes / 2**20:,.0f} MiB, "
                f"{max(0, available) / 2**20:,.0f} MiB are free beside the weights"
            )
        on_host = available - cache_bytes
        if self.is_gpu:
            on_host = free_host_bytes() // self.num_processes
        if host_bytes > on_host:
            raise ModelLoadError(
                f"kv_offload_bytes: {host_bytes / 2**20:,.0f} MiB requested, "
                f"{on_host / 2**20:,.0f} MiB of host memory are free"
            )

    def _gpu_budget(self, available: int) -> int:
        """The size of the cache if none was specified: what the GPU's share leaves."""
        return max(0, available - self._bytes_left_free() - self._step_bytes())

    def _bytes_left_free(self) -> int:
        """What is beyond this engine's share of a GPU's memory, less what others have there: a
        share of a half leaves room for another engine before that one is there, not after."""
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device) - _CONTEXT_BYTES
        beyond = 1 - self.cache.memory_utilization
        return max(int(total * beyond) - max(0, others), int(total * min(beyond, _LEAST_FREE)))

    def _step_bytes(self) -> int:
        limits = self.scheduler.for_device(self.device.type)
        needed = step_bytes(self.spec, limits, self.dtype, has_codes=self.has_codes)
        return needed + (_NUM_STAGES * STAGE_BYTES if self.cache.offload_bytes else 0)

    def no_block_error(self, block_bytes: int, block_size: int, available: int) -> ModelLoadError:
        """Why there is not even one block."""
        if self.cache.memory_bytes is not None:
            return ModelLoadError(
                f"kv_cache_memory_bytes {self.cache.memory_bytes:,} is too little: one block of "
                f"{block_size} tokens takes {block_bytes:,}"
            )
        told = (
            f"no memory for the KV cache: one block takes {block_bytes / 2**20:,.1f} MiB, "
            f"{available / 2**20:,.0f} MiB are free beside the weights"
        )
        if self.is_gpu:
            told += (
                f", of which {self._step_bytes() / 2**20:,.0f} are for steps (fewer with a smaller "
                "--max-num-seqs or --max-num-batched-tokens) and "
                f"{self._bytes_left_free() / 2**20:,.0f} are left free (--gpu-memory-utilization)"
            )
        return ModelLoadError(told)
