"""An engine's statistics as Prometheus families."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from engine.stats import BlockStats, EngineStats, TierStats
from engine.types import EngineInfo
from server.metrics.families import Families
from server.metrics.values import EngineMetricValues


class EngineFamilies:
    """One scrape's families of one engine.

    Args:
        values: of one engine, with its newest report.
        info: of the model, once it is loaded.
        families: makes the families.
        max_loras: adapters that fit on the device; 0 omits the metrics of adapters.
    """

    def __init__(
        self,
        values: EngineMetricValues,
        info: EngineInfo | None,
        families: Families,
        *,
        max_loras: int = 0,
    ) -> None:
        self._values = values
        self._info = info
        self._families = families
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._gauges()
        yield from self._counters()

    def _gauges(self) -> Iterable[Metric]:
        stats = self._values.stats
        blocks = stats.blocks
        if not blocks.total and self._info is not None:  # no step has reported them yet
            num_blocks = self._info.memory.num_blocks
            blocks = BlockStats(total=num_blocks, free=num_blocks)
        for name, help, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            (
                "num_requests_waiting",
                "Sequences waiting to run, or for their images, audio or grammar.",
                stats.num_waiting,
            ),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", blocks.utilisation),
            ("kv_blocks_total", "Total number of KV blocks.", blocks.total),
            ("kv_blocks_held", "KV blocks in use by sequences.", blocks.held),
            ("kv_blocks_shared", "KV blocks shared by several sequences.", blocks.shared),
            ("kv_blocks_cached", "KV blocks with a reusable prefix.", blocks.cached),
            ("kv_blocks_free", "KV blocks that can be allocated.", blocks.free),
            ("kv_wasted_slots", "Unused token slots in KV blocks in use.", blocks.wasted_slots),
        ):
            yield self._families.gauge(name, help, value)
        yield from self._tier_gauges(stats.tier)
        yield from self._snapshot_gauges(stats)
        info = self._info
        if info is not None:
            memory = info.memory
            family = GaugeMetricFamily(
                self._families.name("cache_config_info"),
                "How the KV cache is laid out; always 1.",
                labels=[*self._families.labels, "block_size", "num_gpu_blocks", "cache_dtype"],
            )
            dtype = memory.cache_dtype or info.dtype
            sizes = (str(memory.block_size), str(memory.num_blocks), dtype)
            family.add_metric([*self._families.labels.values(), *sizes], 1)
            yield family
            description = "Number of times the weights were replaced."
            yield self._families.gauge("weights_generation", description, info.generation)
        if self._max_loras:
            family = GaugeMetricFamily(
                self._families.name("lora_requests_info"),
                "Names of the adapters in use, and the most on the device; the value is the time.",
                labels=[
                    *self._families.labels,
                    *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                ],
            )
            names = ",".join(stats.running_adapters), ",".join(stats.waiting_adapters)
            values = [*self._families.labels.values(), str(self._max_loras), *names]
            family.add_metric(values, time.time())
            yield family

    def _tier_gauges(self, tier: TierStats) -> Iterable[Metric]:
        """Gauges of blocks in host memory, if that is configured."""
        memory = None if self._info is None else self._info.memory
        if memory is None or not memory.num_host_blocks:
            return
        total = memory.num_host_blocks
        for name, help, value in (
            ("kv_offload_blocks_total", "Capacity of KV blocks in host memory.", total),
            ("kv_offload_blocks_used", "KV blocks in host memory.", tier.used),
            (
                "kv_offload_bytes_used",
                "Bytes of KV blocks in host memory.",
                tier.used * (memory.host_bytes // total),
            ),
        ):
            yield self._families.gauge(name, help, value)

    def _snapshot_gauges(self, stats: EngineStats) -> Iterable[Metric]:
        """Gauges of state snapshots, if the model has states."""
        memory = None if self._info is None else self._info.memory
        if memory is None or not memory.num_snapshots:
            return
        description = "Capacity for state snapshots."
        yield self._families.gauge("state_snapshots_total", description, memory.num_snapshots)
        description = "State snapshots that prompts can resume from."
        yield self._families.gauge("state_snapshots_used", description, stats.blocks.snapshots)

    def _counters(self) -> Iterable[Metric]:
        numbers, stats = self._values, self._values.stats
        for name, help, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
            (
                "external_prefix_cache_queries",
                "Prompt tokens looked up in host memory.",
                stats.tier.num_queries,
            ),
            (
                "external_prefix_cache_hits",
                "Prompt tokens found in host memory; also counted in prefix_cache_hits.",
                stats.tier.num_hits,
            ),
            ("kv_blocks_offloaded", "KV blocks copied to the host.", stats.tier.num_offloaded),
            ("kv_blocks_loaded", "KV blocks copied back from the host.", stats.tier.num_loaded),
            (
                "num_preemptions",
                "Preemptions: sequences sent back to the queue.",
                stats.num_preemptions,
            ),
            (
                "recomputed_tokens",
                "Tokens recomputed after preemption.",
                stats.num_recomputed,
            ),
            ("spec_decode_num_drafts", "Rows that verified draft tokens.", stats.drafts.num_drafts),
            (
                "spec_decode_num_draft_tokens",
                "Tokens guessed ahead.",
                stats.drafts.num_draft_tokens,
            ),
            (
                "spec_decode_num_accepted_tokens",
                "Guesses kept.",
                stats.drafts.num_accepted_tokens,
            ),
            ("engine_steps", "Steps the engine has run.", stats.num_steps),
            (
                "kv_slots_held",
                "Token slots of KV blocks in use, summed over steps.",
                stats.slots_held_sum,
            ),
            (
                "kv_slots_wasted",
                "Unused token slots of KV blocks in use, summed over steps.",
                stats.slots_wasted_sum,
            ),
            (
                "engine_restarts",
                "Number of engine restarts.",
                numbers.num_restarts,
            ),
            (
                "requests_resumed",
                "Sequences continued after an engine restart.",
                numbers.num_resumed,
            ),
        ):
            yield self._families.counter(name, help, value)
        yield self._families.labelled_counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft.",
            "position",
            {str(at): count for at, count in enumerate(stats.drafts.accepted_per_position)},
        )
