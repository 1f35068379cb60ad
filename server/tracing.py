"""OpenTelemetry tracing: a span for each request served, under ``--otlp-traces-endpoint``.

    chat MODEL            SERVER, its parent the client's traceparent
    ├── queue             until the first step
    ├── prefill           to the first token
    └── decode            to the last; the three for each choice

Spans are made when a request has finished, from times recorded by then, so nothing is kept open
meanwhile and each request pays once. A thread sends them in batches; if there is no collector they
are dropped. Names and attributes follow OpenTelemetry's conventions for generative AI, and vLLM's
for what those leave open. Prompts and texts are never recorded.

The packages (the extra ``otel``) are imported only if tracing is enabled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit, urlunsplit

from engine.types import SamplingParams
from server.setting_sources import InvalidSettings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Tracer

    from server.openai.choice import Choice
    from server.openai.outputs import Usage
    from server.settings import Settings

_log = logging.getLogger(__name__)

TRACE_HEADERS = (b"traceparent", b"tracestate")
_DEFAULT_PATH = "/v1/traces"
_CLOSE_S = 3.0  # for the last batch
_QUEUED, _PREFILL, _DECODE = "queue", "prefill", "decode"


class TracedRequest(NamedTuple):
    """A finished request."""

    id: str
    operation: str  # chat, text_completion or embeddings
    model: str
    tenant: str
    parent: Mapping[str, str] | None  # the client's trace-context headers
    sampling: SamplingParams  # of the first prompt
    usage: Usage
    choices: Sequence[Choice]
    error: str | None  # in one word; None: it succeeded


class Tracing:
    """Makes and exports spans. Never blocks, and never raises into a request.

    Args:
        endpoint: URL of an OTLP collector that accepts spans over HTTP in protobuf; ``/v1/traces``
            is appended to a URL without a path.
        version: of the server.
    """

    def __init__(self, endpoint: str, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        attributes = {"service.version": version}
        if "OTEL_SERVICE_NAME" not in os.environ:
            attributes["service.name"] = "quire"
        # The libraries log every batch that fails; we log it once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._provider = TracerProvider(
            resource=Resource.create(attributes), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(_with_path(endpoint))))
        self._tracer: Tracer = self._provider.get_tracer("quire", version)

    @classmethod
    def of(cls, settings: Settings, version: str) -> Self | None:
        """The tracing that the settings ask for; None if disabled.

        Raises:
            InvalidSettings: the packages are not installed, or one of their own variables is
                invalid.
        """
        if settings.otlp_traces_endpoint is None:
            return None
        _check_packages()
        try:
            return cls(settings.otlp_traces_endpoint, version)
        except ValueError as error:
            raise InvalidSettings(f"OpenTelemetry, by the variables OTEL_*: {error}") from None

    def record(self, request: TracedRequest) -> None:
        """Make the spans of a request that has just finished."""
        try:
            self._record(request)
        except Exception:
            _log.exception("the spans of request %s could not be made", request.id)

    async def close(self) -> None:
        """Send what is left, giving up if no collector takes it soon."""
        # Not one of the loop's threads: the process would wait for those without limit.
        closing = threading.Thread(target=self.shut_down, name="otel-close", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)

    def shut_down(self) -> None:
        """Send what is left, however long it takes."""
        self._provider.shutdown()

    # ------------------------------------------------------------ helpers

    def _record(self, request: TracedRequest) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        clock_ns = time.time_ns() - time.monotonic_ns()  # monotonic to wall-clock time
        now_ns = time.time_ns()
        arrival_s = min(choice.request.arrival_s for choice in request.choices)
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=_context(request.parent),
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=_ns(arrival_s) + clock_ns,
        )
        if not span.is_recording():  # the client's trace is not sampled
            return
        if request.error is not None:
            span.set_status(StatusCode.ERROR, request.error)
        inside = set_span_in_context(span)
        for choice in request.choices:
            for name, begin_s, end_s in _phases(choice):
                child = self._tracer.start_span(
                    name,
                    context=inside,
                    attributes={"quire.choice.index": choice.index},
                    start_time=_ns(begin_s) + clock_ns,
                )
                child.end(_ns(end_s) + clock_ns)
        span.end(now_ns)


def check_tracing(settings: Settings) -> None:
    """Check that spans can be made as the settings ask, before anything expensive.

    Raises:
        InvalidSettings: as for ``Tracing.of``.
    """
    tracing = Tracing.of(settings, "")
    if tracing is not None:
        tracing.shut_down()


def _check_packages() -> None:
    """Raise InvalidSettings if the tracing packages are missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as error:
        raise InvalidSettings(
            f"--otlp-traces-endpoint: there is no module {error.name}; "
            "'.venv/bin/pip install -e .[otel]' installs it"
        ) from None


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """The trace-context headers among a request's headers; None if there are none."""
    found = {
        name.decode(): value.decode("latin-1") for name, value in headers if name in TRACE_HEADERS
    }
    return found if "traceparent" in found else None


def _context(parent: Mapping[str, str] | None) -> Context | None:
    if parent is None:
        return None
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(parent, Context())


def _attributes(request: TracedRequest) -> dict[str, Any]:
    """The attributes of a request's span; unknown ones are left out."""
    sampling, usage, choices = request.sampling, request.usage, request.choices
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.id,
        "gen_ai.request.id": request.id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": [_reason(choice, request.error) for choice in choices],
    }
    if details := usage.prompt_tokens_details:
        attributes["gen_ai.usage.cache_read.input_tokens"] = details.cached_tokens
    if request.operation != "embeddings":
        attributes |= {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        if sampling.top_k > 0:
            attributes["gen_ai.request.top_k"] = sampling.top_k
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if sampling.seed is not None:
            attributes["gen_ai.request.seed"] = sampling.seed
        if sampling.n > 1:
            attributes["gen_ai.request.choice.count"] = sampling.n
    if request.tenant:
        attributes["quire.tenant"] = request.tenant
    if request.error is not None:
        attributes["error.type"] = request.error
    return attributes | _latencies(choices)


def _latencies(choices: Sequence[Choice]) -> dict[str, float]:
    """vLLM's latency attributes in seconds, for the first choice that succeeded."""
    timings = next((choice.timings for choice in choices if choice.timings is not None), None)
    if timings is None:
        return {}
    attributes = {
        "time_in_queue": timings.queue_ms,
        "time_in_model_prefill": timings.prefill_ms,
        "time_in_model_decode": timings.decode_ms,
        "time_to_first_token": timings.first_token_ms,
        "e2e": timings.total_ms,
    }
    return {
        f"gen_ai.latency.{name}": milliseconds / 1e3
        for name, milliseconds in attributes.items()
        if milliseconds is not None
    }


def _phases(choice: Choice) -> list[tuple[str, float, float]]:
    """The phases of a choice: (name, start, end) in seconds of the monotonic clock.

    Empty if the choice failed, or its client has gone.
    """
    timings = choice.timings
    if timings is None or timings.queue_ms is None:
        return []
    phases: list[tuple[str, float, float]] = []
    begin_s = choice.request.arrival_s
    for name, length_ms in (
        (_QUEUED, timings.queue_ms),
        (_PREFILL, timings.prefill_ms),
        (_DECODE, timings.decode_ms),
    ):
        end_s = begin_s + (length_ms or 0.0) / 1e3
        phases.append((name, begin_s, end_s))
        begin_s = end_s
    return phases


def _reason(choice: Choice, error: str | None) -> str:
    if choice.finish_reason is not None:
        return choice.finish_reason
    return "abort" if error is None else "error"


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _with_path(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else urlunsplit(parts._replace(path=_DEFAULT_PATH))


def _exporter(endpoint: str) -> SpanExporter:
    """An exporter that logs once if it cannot send."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    shown = endpoint.rpartition("@")[2]  # without a password

    class Exporter(SpanExporter):
        def __init__(self) -> None:
            self._inner = OTLPSpanExporter(endpoint)
            self._is_failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = self._inner.export(spans)
            is_failing = result is not SpanExportResult.SUCCESS
            if is_failing and not self._is_failing:
                _log.warning("no collector takes spans at %s; they are dropped", shown)
            elif self._is_failing and not is_failing:
                _log.info("spans are taken again at %s", shown)
            self._is_failing = is_failing
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()

    return Exporter()
