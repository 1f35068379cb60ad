"""Every metric name, in one place, and the cheap counters behind them.

Names, labels and buckets are those that dashboards know from other servers of this kind, under
our own prefix (``--metrics-prefix vllm`` emits the familiar names). Values are plain numbers that
the event loop adds to; they become Prometheus families only when somebody asks, so that a token
costs a few additions and no lock. Gauges are read from the engine's newest snapshot.

A *sequence* is one choice of one prompt: a request with ``n = 2`` counts two. Prompt tokens are
counted once a prompt, as in ``usage``. Every sequence that was submitted ends in exactly one of
``request_success``, ``request_failed`` and ``request_aborted``.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.client import EngineClient
from engine.types import BlockStats, EngineInfo, EngineOutput, RequestTimings

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_ITERATION = (1.0, *(float(2**e) for e in range(3, 15)))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Between two tokens of a sequence.", _PER_TOKEN),
    "request_time_per_output_token_seconds": ("Mean of a sequence, after its first.", _PER_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _LATENCY),
    "request_queue_time_seconds": ("From arrival to the first step.", _LATENCY),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LATENCY),
    "request_decode_time_seconds": ("From the first token to the last.", _LATENCY),
    "request_inference_time_seconds": ("From the first step to the last token.", _LATENCY),
    "request_prompt_tokens": ("Tokens of a sequence's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens a finished sequence generated.", _TOKENS),
    "request_params_max_tokens": ("The max_tokens that sequences asked for.", _TOKENS),
    "request_params_n": ("The n that requests asked for.", _CHOICES),
    "iteration_tokens_total": ("Tokens computed by one step.", _ITERATION),
}
_COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens taken in.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Tokens generated and handed to clients.",
}
_LABELLED_COUNTERS: dict[str, tuple[str, str]] = {
    "request_success": ("finished_reason", "Sequences that ended well."),
    "request_failed": ("reason", "Sequences that ended by an error."),
    "request_aborted": ("phase", "Sequences whose client went away, by how far they had come."),
    "admission_rejections": ("reason", "Requests refused before the engine took them."),
}


class Histogram:
    """Counts by bucket, and a sum. ``bounds`` are upper limits, inclusive, rising."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add ``value``, as often as it occurred."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper limit, as Prometheus wants them."""
        limits = [*map(str, self.bounds), "+Inf"]
        return list(zip(limits, map(float, accumulate(self.counts)), strict=True))


class Metrics(Collector):
    """The metrics of one application, on a registry of their own."""

    def __init__(self, engine: EngineClient, *, prefix: str, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._engine = engine
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self._info: EngineInfo | None = None
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._counts: Counter[str] = Counter()
        self._labelled: dict[str, Counter[str]] = {name: Counter() for name in _LABELLED_COUNTERS}
        self._http: Counter[tuple[str, str, str]] = Counter()
        # Live sequences: when their newest token came, None before the first.
        self._last_token_s: dict[str, float | None] = {}
        self._arrival_s: dict[str, float] = {}
        self._ttft = self._histograms["time_to_first_token_seconds"]
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._iteration = self._histograms["iteration_tokens_total"]
        engine.on_output(self._on_output)
        self.registry.register(self)

    # ------------------------------------------------------------ written by the API

    def set_model(self, info: EngineInfo) -> None:
        """Tell what was loaded, for the ``cache_config_info`` gauge."""
        self._info = info

    def submitted(self, id: str, arrival_s: float, prompt_tokens: int, max_tokens: int) -> None:
        """A sequence went to the engine."""
        self._last_token_s[id] = None
        self._arrival_s[id] = arrival_s
        self._histograms["request_prompt_tokens"].observe(prompt_tokens)
        self._histograms["request_params_max_tokens"].observe(max_tokens)

    def prompt(self, tokens: int, n: int) -> None:
        """A prompt was taken in, to be continued ``n`` times."""
        self._counts["prompt_tokens"] += tokens
        self._histograms["request_params_n"].observe(n)

    def cached(self, tokens: int) -> None:
        """So many tokens of a prompt were found in the prefix cache."""
        self._counts["prompt_tokens_cached"] += tokens

    def generated(self, tokens: int) -> None:
        """So many tokens were taken by the API."""
        self._counts["generation_tokens"] += tokens

    def finished(self, id: str, reason: str, tokens: int, timings: RequestTimings | None) -> None:
        """A sequence ended well, after ``tokens`` of output."""
        arrival_s = self._forget(id)
        if arrival_s is None:
            return
        self._labelled["request_success"][reason] += 1
        now = time.monotonic()
        observe = self._histograms
        observe["request_generation_tokens"].observe(tokens)
        observe["e2e_request_latency_seconds"].observe(max(0.0, now - arrival_s))
        if timings is None or not timings.scheduled_s:
            return  # ended by the API (a stop string) before the engine told
        first_s = timings.first_token_s or timings.finished_s
        decode_s = max(0.0, timings.finished_s - first_s)
        observe["request_queue_time_seconds"].observe(
            max(0.0, timings.scheduled_s - timings.arrival_s)
        )
        observe["request_prefill_time_seconds"].observe(max(0.0, first_s - timings.scheduled_s))
        observe["request_decode_time_seconds"].observe(decode_s)
        observe["request_inference_time_seconds"].observe(
            max(0.0, timings.finished_s - timings.scheduled_s)
        )
        if tokens > 1:
            observe["request_time_per_output_token_seconds"].observe(decode_s / (tokens - 1))

    def failed(self, id: str, reason: str) -> None:
        """A sequence ended by an error."""
        if self._forget(id) is not None:
            self._labelled["request_failed"][reason] += 1

    def aborted(self, id: str, phase: str) -> None:
        """A sequence ended because its client went away."""
        if self._forget(id) is not None:
            self._labelled["request_aborted"][phase] += 1

    def rejected(self, reason: str) -> None:
        """A request was refused before the engine took it."""
        self._labelled["admission_rejections"][reason] += 1

    def http_request(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered; ``route`` is a template, never the client's path."""
        self._http[method, route, str(status)] += 1

    def _forget(self, id: str) -> float | None:
        self._last_token_s.pop(id, None)
        return self._arrival_s.pop(id, None)

    def _on_output(self, output: EngineOutput) -> None:
        """Latencies of each step's tokens, told by the engine as the step ends."""
        if output.stats.step_tokens:
            self._iteration.observe(output.stats.step_tokens)
        now = time.monotonic()
        last_token_s = self._last_token_s
        for id, tokens in zip(output.ids, output.token_ids, strict=True):
            if not tokens or id not in last_token_s:
                continue
            last = last_token_s[id]
            if last is None:
                self._ttft.observe(max(0.0, now - self._arrival_s[id]))
                if len(tokens) > 1:
                    self._itl.observe(0.0, len(tokens) - 1)
            else:
                self._itl.observe((now - last) / len(tokens), len(tokens))
            last_token_s[id] = now

    # ------------------------------------------------------------ read by a scrape

    def collect(self) -> Iterator[Metric]:
        """All families, from the numbers as they stand."""
        yield from self._engine_gauges()
        yield from self._engine_counters()
        for name, help in _COUNTERS.items():
            yield self._counter(name, help, self._counts[name])
        for name, (label, help) in _LABELLED_COUNTERS.items():
            yield self._labelled_counter(name, help, label, self._labelled[name])
        for name, (help, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(self._name(name), help, labels=list(self._labels))
            histogram = self._histograms[name]
            family.add_metric(
                list(self._labels.values()), histogram.buckets(), sum_value=histogram.total
            )
            yield family
        http = CounterMetricFamily(
            self._name("http_requests"),
            "HTTP requests answered.",
            labels=["method", "route", "status"],
        )
        for labels, count in self._http.items():
            http.add_metric(labels, count)
        yield http

    def _engine_gauges(self) -> Iterable[Metric]:
        stats = self._engine.stats
        blocks = stats.blocks
        if not blocks.total and self._info is not None:  # no step has told them yet
            num_blocks = self._info.memory.num_blocks
            blocks = BlockStats(total=num_blocks, free=num_blocks)
        for name, help, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for a place.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", blocks.utilisation),
            ("kv_blocks_total", "KV blocks there are.", blocks.total),
            ("kv_blocks_held", "KV blocks that sequences hold.", blocks.held),
            ("kv_blocks_shared", "KV blocks that several sequences hold.", blocks.shared),
            ("kv_blocks_cached", "KV blocks with a reusable prefix.", blocks.cached),
            ("kv_blocks_free", "KV blocks that can be allocated.", blocks.free),
            ("kv_wasted_slots", "Token slots in held blocks without a token.", blocks.wasted_slots),
        ):
            yield self._gauge(name, help, value)
        info = self._info
        if info is not None:
            memory = info.memory
            family = GaugeMetricFamily(
                self._name("cache_config_info"),
                "How the KV cache is laid out; always 1.",
                labels=[*self._labels, "block_size", "num_gpu_blocks", "cache_dtype"],
            )
            sizes = (str(memory.block_size), str(memory.num_blocks), info.dtype)
            family.add_metric([*self._labels.values(), *sizes], 1)
            yield family

    def _engine_counters(self) -> Iterable[Metric]:
        stats = self._engine.stats
        for name, help, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences sent back to the queue.", stats.num_preemptions),
            ("engine_steps", "Steps the engine has run.", stats.num_steps),
            ("kv_slots_held", "Slots of held blocks, summed over steps.", stats.slots_held_sum),
            ("kv_slots_wasted", "Slots without a token, so summed.", stats.slots_wasted_sum),
            (
                "engine_restarts",
                "Times the engine process was started again.",
                getattr(self._engine, "num_restarts", 0),
            ),
            (
                "requests_resumed",
                "Sequences continued after such a restart.",
                getattr(self._engine, "num_resumed", 0),
            ),
        ):
            yield self._counter(name, help, value)

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._name(name), help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name(name), help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _labelled_counter(
        self, name: str, help: str, label: str, counts: Counter[str]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name(name), help, labels=[*self._labels, label])
        for value, count in counts.items():
            family.add_metric([*self._labels.values(), value], count)
        return family
