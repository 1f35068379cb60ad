"""Spans as a real collector receives them over HTTP, in OTLP's protobuf."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine.errors import OutOfMemory
from server.tracing import _with_path, trace_headers
from tests.server.asgi import running_app
from tests.servers import MODEL, ROOT, Server, running_server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}


class Collector:
    """Receives spans at ``url``."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self._news = threading.Condition()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(self.path, ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, request: ExportTraceServiceRequest) -> None:
        with self._news:
            self.paths.add(path)
            for group in request.resource_spans:
                self.resources.append(values(group.resource))
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
            self._news.notify_all()

    def request(self, response_id: str, limit_s: float = 30.0) -> Span:
        """The span of a response, once it and all earlier ones have arrived."""
        with self._news:
            assert self._news.wait_for(lambda: self._find(response_id), limit_s), "no span came"
            return self._find(response_id)[0]

    def children(self, parent: Span) -> list[Span]:
        """The child spans in the order of their start."""
        with self._news:
            self._news.wait_for(lambda: self._below(parent), 10)
            return sorted(self._below(parent), key=lambda span: span.start_time_unix_nano)

    def _find(self, response_id: str) -> list[Span]:
        return [s for s in self.spans if values(s).get("gen_ai.response.id") == response_id]

    def _below(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_span_id == parent.span_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def values(thing: Any) -> dict[str, Any]:
    """Attributes by name."""
    told: dict[str, Any] = {}
    for attribute in thing.attributes:
        value = attribute.value
        kind = value.WhichOneof("value")
        if kind == "array_value":
            told[attribute.key] = [one.string_value for one in value.array_value.values]
        else:
            told[attribute.key] = getattr(value, kind)
    return told


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("traced") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        with running_server(log, "--otlp-traces-endpoint", collector.url) as server:
            yield server


def test_a_request_is_one_span_below_its_clients(server: Server, collector: Collector) -> None:
    before_ns = time.time_ns()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}]}
    fields = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 9, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", {**body, **fields}, headers=HEADERS).json()
    span = collector.request(answer["id"])
    after_ns = time.time_ns()
    assert (span.name, span.kind) == (f"chat {MODEL}", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.trace_state == "vendor=x"
    assert span.status.code == Status.STATUS_CODE_UNSET
    told = values(span)
    usage = answer["usage"]
    latencies = {key: told.pop(key) for key in list(told) if ".latency." in key}
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.id": answer["id"],
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
    }
    first, e2e = (latencies[f"gen_ai.latency.{name}"] for name in ("time_to_first_token", "e2e"))
    assert 0 < first < e2e < (after_ns - before_ns) / 1e9
    phases = collector.children(span)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    times = [span.start_time_unix_nano, phases[0].start_time_unix_nano]
    for phase, following in zip(phases, [*phases[1:], span], strict=True):
        times.append(phase.end_time_unix_nano)
        if following is not span:
            assert following.start_time_unix_nano == phase.end_time_unix_nano
    times.append(span.end_time_unix_nano)
    slack_ns = 10**6  # two clocks are read one after the other
    assert all(later >= earlier - slack_ns for earlier, later in pairwise(times))
    assert before_ns - slack_ns <= times[0]
    assert times[-1] <= after_ns + slack_ns
    decode_s = (phases[2].end_time_unix_nano - phases[2].start_time_unix_nano) / 1e9
    assert decode_s == pytest.approx(latencies["gen_ai.latency.time_in_model_decode"], abs=1e-5)
    assert collector.paths == {"/v1/traces"}
    resource = collector.resources[0]
    assert resource["service.name"] == "quire"
    assert resource["deployment.environment"] == "test"


def test_streams_choices_and_vectors_too(server: Server, collector: Collector) -> None:
    completion = server.complete("One", n=2, max_tokens=3, temperature=1).json()
    span = collector.request(completion["id"])
    assert span.name == f"text_completion {MODEL}"
    assert not span.parent_span_id
    assert values(span)["gen_ai.request.choice.count"] == 2
    assert values(span)["gen_ai.response.finish_reasons"] == [
        choice["finish_reason"] for choice in completion["choices"]
    ]
    assert len(collector.children(span)) == 6
    stream = server.stream("/v1/chat/completions", {"model": MODEL, "max_tokens": 4, "messages": [
        {"role": "user", "content": "Hi"}]}).decode()  # fmt: skip
    id_ = stream.split('"id":"', 1)[1].split('"', 1)[0]
    assert values(collector.request(id_))["gen_ai.usage.output_tokens"] <= 4
    vectors = server.post("/v1/embeddings", {"model": MODEL, "input": "Hello"})
    assert vectors.status_code == 200, vectors.text
    deadline = time.monotonic() + 20
    while not any(span.name == f"embeddings {MODEL}" for span in collector.spans):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_choice_that_a_stop_string_ended_has_its_phases(
    server: Server, collector: Collector
) -> None:
    answer = server.complete("Once upon a time", max_tokens=20, stop=["e"], temperature=0).json()
    assert answer["choices"][0]["stop_reason"] == "e"
    phases = collector.children(collector.request(answer["id"]))
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]


def test_a_client_that_is_not_sampled_is_not_traced(server: Server, collector: Collector) -> None:
    server.complete("Two", max_tokens=1)
    unsampled = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"}
    body = {"model": MODEL, "prompt": "Three", "max_tokens": 1}
    skipped = server.post("/v1/completions", body, headers=unsampled).json()["id"]
    malformed = server.post("/v1/completions", body, headers={"traceparent": "nonsense"})
    collector.request(malformed.json()["id"])  # sent later than the previous one
    assert skipped not in {values(span).get("gen_ai.response.id") for span in collector.spans}


async def test_what_fails_says_why(collector: Collector, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    async with running_app(otlp_traces_endpoint=collector.url + "/v1/traces") as app:
        call = app.post("/v1/completions", prompt="Hi", stream=True)
        stream = await app.engine.next_stream()
        id_ = app.engine.streams[-1].request_id
        stream.fail(OutOfMemory("full"))
        await call.done()
    span = collector.request(id_)
    assert span.status.code == Status.STATUS_CODE_ERROR
    told = values(span)
    assert told["error.type"] == "out_of_memory"
    assert told["gen_ai.response.finish_reasons"] == ["error"]
    assert collector.resources[-1]["service.name"] == "mine"


@pytest.mark.slow  # waits for a connection that never comes
def test_without_a_collector_requests_go_on_and_it_is_said_once(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        flags = ("--load-format", "stub", "--otlp-traces-endpoint", "http://user:pw@127.0.0.1:1")
        with running_server(tmp_path / "log", *flags) as server:
            told = "no collector takes spans"
            deadline = time.monotonic() + 30
            while told not in server.log.read_text():
                assert server.complete(max_tokens=2).status_code == 200
                assert time.monotonic() < deadline
            for _ in range(20):
                assert server.complete(max_tokens=2).status_code == 200
            assert server.stop() == 0
            log = server.log.read_text()
    assert log.count(told) == 1
    assert "127.0.0.1:1/v1/traces" in log
    assert "pw@" not in log
    assert "Traceback" not in log


def test_nothing_is_imported_where_it_is_off() -> None:
    code = (
        "import sys, server.app, server.cli.serve; "
        "bad = [name for name in sys.modules if name.startswith('opentelemetry.sdk')]; "
        "assert not bad, bad; assert 'google.protobuf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_variable_that_cannot_be_used_is_one_line() -> None:
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--api-workers", "2"]
    command += ["--otlp-traces-endpoint", "http://c:4318"]
    env = {**os.environ, "OTEL_BSP_MAX_QUEUE_SIZE": "-4"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("quire serve: OpenTelemetry")
    assert "max_queue_size" in line


def test_without_the_packages_it_is_one_line() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http'] = None; "
        "from server.cli import main; "
        "sys.exit(main(['serve', '--port', '0', '--otlp-traces-endpoint', 'http://c:4318']))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("quire serve: --otlp-traces-endpoint: there is no module")
    assert "'.venv/bin/pip install -e .[otel]' installs it" in line


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c/own/path", "http://c/own/path"),
    ],
)
def test_an_endpoint_without_a_path_has_the_usual_one(given: str, used: str) -> None:
    assert _with_path(given) == used


def test_only_a_traceparent_makes_a_trace() -> None:
    assert trace_headers([(b"tracestate", b"a=b"), (b"host", b"x")]) is None
