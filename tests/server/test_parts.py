"""Parts in isolation: JSON parsing, metrics, the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from server.errors import ApiError
from server.metrics import MetricValues
from server.metrics.exposition import Exposition
from server.openai.inputs import ChatRequest, CompletionRequest
from server.openai.json_body import parse_json_body
from tests.server.asgi import running_app

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
@settings(max_examples=100, deadline=None)
def test_json_objects_are_read(value: dict[str, Any]) -> None:
    assert parse_json_body(json.dumps(value).encode()) == value


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_as_such(body: bytes) -> None:
    try:
        expected = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        expected = None
    if isinstance(expected, dict):
        assert parse_json_body(body) == expected
    else:
        with pytest.raises(ApiError) as caught:
            parse_json_body(body)
        assert caught.value.status == 400


@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), JSON, max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_object_is_a_request_or_a_400_that_names_a_field(fields: dict[str, Any]) -> None:
    for shape, base in (
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        (CompletionRequest, {"model": "m", "prompt": "x"}),
    ):
        refused: list[ApiError] = []
        try:
            shape.read({**base, **fields})
        except ApiError as error:
            refused.append(error)
        assert all(error.status == 400 and error.param for error in refused)


def test_histogram_buckets_are_cumulative() -> None:
    numbers = MetricValues.zero()
    for value in (0.5, 1.0, 1.5, 99.0):
        numbers.observe("request_params_n", value)
    numbers.observe("request_params_n", 2.0, times=3)
    (family,) = [
        family
        for family in Exposition(numbers, [None], prefix="p", model_name="m").collect()
        if family.name == "p:request_params_n"
    ]
    buckets = {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}
    assert buckets == {"1.0": 2, "2.0": 6, "5.0": 6, "10.0": 6, "20.0": 6, "+Inf": 7}
    assert [s.value for s in family.samples if s.name.endswith("_sum")] == [108.0]


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
async def test_metric_names(prefix: str) -> None:
    """The names and labels that dashboards know, under either prefix."""
    async with running_app(metrics_prefix=prefix) as app:
        call = app.post("/v1/completions", prompt="Hi")
        (await app.engine.next_stream()).put(300, end="length", num_cached_tokens=0)
        await call.done()
        text = (await app.get("/metrics")).body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("cache_config_info", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
        *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success"),
        *("request_failed", "request_aborted", "admission_rejections", "engine_restarts"),
        *("requests_resumed", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
        *("iteration_tokens_total", "request_params_n", "kv_blocks_total", "kv_blocks_free"),
    ):
        family = families[f"{prefix}:{name}"]
        for sample in family.samples:
            assert sample.labels["model_name"] == "quire-demo"
            assert sample.labels["engine"] == "0"
    assert not any(name.endswith("_created") for name in families)


async def test_counters_of_what_may_go_wrong_begin_at_zero() -> None:
    """One that appears as 1 has not increased, for Prometheus and its alerts."""
    async with running_app() as app:
        text = (await app.get("/metrics")).body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        for name, value in (
            ("request_failed", "deadline"),
            ("request_aborted", "waiting"),
            ("admission_rejections", "queue_full"),
        ):
            found = {
                tuple(s.labels.values())[-1]: s.value for s in families[f"quire:{name}"].samples
            }
            assert found[value] == 0
            assert not any(found.values())


async def test_openapi_document_describes_every_body() -> None:
    async with running_app() as app:
        document = json.loads((await app.get("/openapi.json")).body)
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= set(schemas)
    posts = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= set(posts)
    without_body = {path for path, post in posts.items() if "requestBody" not in post}
    bodiless = {"/stop_profile", "/sleep", "/wake_up"}
    assert all(path in bodiless or path.endswith("/cancel") for path in without_body)
