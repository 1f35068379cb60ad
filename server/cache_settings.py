"""The part of ``server/settings.py`` for the KV cache."""

from __future__ import annotations

from engine.config import CacheDtype
from server.setting import SettingsPart, setting
from server.setting_values import ScaledInt

CACHE = "KV cache"


class CacheSettings(SettingsPart):
    """The cache's capacity, format and lifetime; see docs/kv-cache.md."""

    block_size: int | None = setting(
        None,
        CACHE,
        "Tokens per KV block. Default: 64 on a GPU, 16 on a CPU.",
        ge=1,
        le=1024,
    )
    kv_cache_dtype: CacheDtype = setting(
        "auto",
        CACHE,
        "Number format of keys and values. auto is the model's; int8 and fp8 (e4m3) need about "
        "half the memory of 16 bits, with one scale per token and head. See docs/kv-cache.md.",
    )
    enable_prefix_caching: bool = setting(
        True, CACHE, "Keep the KV blocks of finished requests for prompts with the same beginning."
    )
    kv_cache_memory_bytes: ScaledInt | None = setting(
        None,
        CACHE,
        "Size of the KV cache, such as 2GiB. Default: on a GPU what --gpu-memory-utilization "
        "leaves; on a CPU 512 MiB, or more if one sequence of full length needs it.",
        ge=1,
    )
    kv_offload_bytes: ScaledInt = setting(
        0,
        CACHE,
        "Host memory for KV blocks evicted from the cache, such as 8GiB: prefixes and preempted "
        "sequences are copied back instead of computed again. 0 is off. See docs/kv-cache.md.",
        ge=0,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        CACHE,
        "Share of a GPU's memory for this engine, including the weights: with 0.45, two servers "
        "share a GPU.",
        gt=0,
        le=1,
    )
    num_gpu_blocks_override: int | None = setting(
        None, CACHE, "Number of KV blocks, on any device, regardless of memory.", ge=1
    )
