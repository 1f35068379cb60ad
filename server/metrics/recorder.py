"""The counters behind the metrics, and the methods that update them."""

from __future__ import annotations

import time
from functools import partial

from engine.client import EngineClient
from engine.types import EngineOutput, RequestTimings
from server.metrics.exposition import Exposition
from server.metrics.values import EngineMetricValues, MetricValues


class Metrics:
    """The metrics of one application, on a registry of their own.

    Args:
        engine: its outputs are observed.
        prefix: first part of every name.
        model_name: a label of every sample.
        max_loras: adapters that fit on the device, for the gauge that names those in use.
    """

    def __init__(
        self, engine: EngineClient, *, prefix: str, model_name: str, max_loras: int = 0
    ) -> None:
        self._engine = engine
        self._model_name = model_name
        self._prefix = prefix
        self._max_loras = max_loras
        self._is_loaded = False
        self._values = MetricValues.zero()
        # Live sequences: the time of their newest token, None before the first.
        self._last_token_s: dict[str, float | None] = {}
        self._arrival_s: dict[str, float] = {}
        engine.on_output(self._on_output)

    # ------------------------------------------------------------ written by the API

    def set_loaded(self) -> None:
        """Note that the engine has loaded, for the ``cache_config_info`` gauge."""
        self._is_loaded = True

    def record_submitted(
        self, id: str, arrival_s: float, prompt_tokens: int, max_tokens: int
    ) -> None:
        """Count a sequence submitted to the engine."""
        self._last_token_s[id] = None
        self._arrival_s[id] = arrival_s
        self._values.observe("request_prompt_tokens", prompt_tokens)
        self._values.observe("request_params_max_tokens", max_tokens)

    def record_prompt(
        self, tokens: int, n: int, *, images: int = 0, audio: int = 0, videos: int = 0
    ) -> None:
        """Count a prompt that is continued ``n`` times."""
        self._values.counts["prompt_tokens"] += tokens
        self._values.counts["prompt_images"] += images
        self._values.counts["prompt_audio_clips"] += audio
        self._values.counts["prompt_videos"] += videos
        self._values.observe("request_params_n", n)

    def record_cached_tokens(self, tokens: int) -> None:
        """Count tokens of a prompt found in the prefix cache."""
        self._values.counts["prompt_tokens_cached"] += tokens

    def record_generated_tokens(self, tokens: int) -> None:
        """Count output tokens that the API has received."""
        self._values.counts["generation_tokens"] += tokens

    def record_finished(self, id: str, reason: str, tokens: int, timings: RequestTimings) -> None:
        """Count a sequence that succeeded with ``tokens`` of output."""
        arrival_s = self._forget(id)
        if arrival_s is None:
            return
        self._values.count("request_success", reason)
        now = time.monotonic()
        observe = self._values.observe
        observe("request_generation_tokens", tokens)
        observe("e2e_request_latency_seconds", max(0.0, now - arrival_s))
        if not timings.scheduled_s:
            return  # unknown
        first_s = timings.first_token_s or timings.finished_s
        decode_s = max(0.0, timings.finished_s - first_s)
        observe("request_queue_time_seconds", max(0.0, timings.scheduled_s - timings.arrival_s))
        observe("request_prefill_time_seconds", max(0.0, first_s - timings.scheduled_s))
        observe("request_decode_time_seconds", decode_s)
        observe(
            "request_inference_time_seconds", max(0.0, timings.finished_s - timings.scheduled_s)
        )
        if tokens > 1:
            observe("request_time_per_output_token_seconds", decode_s / (tokens - 1))

    def record_failed(self, id: str, reason: str) -> None:
        """Count a sequence that failed."""
        if self._forget(id) is not None:
            self._values.count("request_failed", reason)

    def record_aborted(self, id: str, phase: str) -> None:
        """Count a sequence whose client disconnected."""
        if self._forget(id) is not None:
            self._values.count("request_aborted", phase)

    def is_live(self, id: str) -> bool:
        """Whether a sequence was submitted and its end has not been counted."""
        return id in self._arrival_s

    def record_rejected(self, reason: str, tenant: str = "") -> None:
        """Count a request that was refused before submission."""
        self._values.count("admission_rejections", reason)
        if tenant:
            self._values.count("tenant_rejections", tenant)

    def record_tenant_usage(
        self, tenant: str, *, requests: int, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Count a tenant's usage; there are as many tenants as the key file has entries."""
        self._values.count("tenant_requests", tenant, requests)
        self._values.count("tenant_prompt_tokens", tenant, prompt_tokens)
        self._values.count("tenant_generation_tokens", tenant, output_tokens)

    def record_http_request(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response; ``route`` is a template, never the client's path."""
        key = method, route, str(status)
        self._values.http[key] = self._values.http.get(key, 0) + 1

    def _forget(self, id: str) -> float | None:
        self._last_token_s.pop(id, None)
        return self._arrival_s.pop(id, None)

    def _on_output(self, output: EngineOutput) -> None:
        """Record the latencies of each step's tokens, reported by the engine as the step ends."""
        numbers, last_token_s = self._values, self._last_token_s
        if output.stats.step_tokens:
            numbers.observe("iteration_tokens_total", output.stats.step_tokens)
        now = time.monotonic()
        observe_gap = partial(numbers.observe, "inter_token_latency_seconds")
        gaps: dict[tuple[float, int], int] = {}  # by previous time and count, mostly shared
        for id, tokens in zip(output.ids, output.token_ids, strict=True):
            if not tokens or id not in last_token_s:
                continue
            last = last_token_s[id]
            if last is None:
                since_s = max(0.0, now - self._arrival_s[id])
                numbers.observe("time_to_first_token_seconds", since_s)
                if len(tokens) > 1:
                    observe_gap(0.0, len(tokens) - 1)
            else:
                gap = last, len(tokens)
                gaps[gap] = gaps.get(gap, 0) + 1
            last_token_s[id] = now
        for (last, count), times in gaps.items():
            observe_gap((now - last) / count, count * times)

    # ------------------------------------------------------------ read by a scrape

    @property
    def values(self) -> MetricValues:
        """This process's current numbers, with the engines' newest reports."""
        self._values.engines = [
            EngineMetricValues(
                stats=engine.stats,
                stats_s=getattr(engine, "stats_s", 0.0),
                up=engine.alive,
                num_restarts=getattr(engine, "num_restarts", 0),
                num_resumed=getattr(engine, "num_resumed", 0),
            )
            for engine in self._engine.members
        ]
        return self._values

    def exposition(self, values: MetricValues) -> Exposition:
        """The exposition of ``values``, which are this process's or the sum of all workers'."""
        return Exposition(
            values,
            # The weights may have been replaced.
            [
                engine.info if self._is_loaded and not engine.dead else None
                for engine in self._engine.members
            ],
            prefix=self._prefix,
            model_name=self._model_name,
            max_loras=self._max_loras,
        )
