"""Embeddings, reranking and scores of the demo model, with the openai SDK and plain HTTP."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator

import openai
import pytest

from tests.servers import MODEL, Server, running_server

TEXTS = ["The capital of France is Paris.", "Paris is the capital of France.", "Seven green apples"]
CONTEXT = 128


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("embeddings") / "log"
    flags = ("--max-model-len", str(CONTEXT), "--max-prompts", "300", "--dtype", "float32")
    with running_server(log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed(server: Server, inputs: object, **fields: object) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"model": MODEL, "input": inputs, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    return [entry["embedding"] for entry in body["data"]]


def near(a: list[float], b: list[float], tolerance: float = 1e-5) -> bool:
    return len(a) == len(b) and all(
        math.isclose(x, y, abs_tol=tolerance) for x, y in zip(a, b, strict=True)
    )


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.hypot(*a) / math.hypot(*b)


def test_the_sdk_asks_for_base64_and_gets_what_floats_say(
    client: openai.OpenAI, server: Server
) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    tokens = sum(
        server.post("/tokenize", {"model": MODEL, "prompt": text}).json()["count"] for text in TEXTS
    )
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    for first, second in zip(answer.data, floats.data, strict=True):
        assert near(first.embedding, second.embedding)
        assert math.isclose(math.hypot(*first.embedding), 1.0, abs_tol=1e-5)


def test_base64_is_little_endian_float32(server: Server) -> None:
    coded = embed(server, TEXTS[0], encoding_format="base64")[0]
    assert isinstance(coded, str)
    raw = base64.b64decode(coded)
    plain = embed(server, TEXTS[0])[0]
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == plain


def test_one_input_is_the_same_in_each_of_its_forms(server: Server) -> None:
    ids = server.post("/tokenize", {"model": MODEL, "prompt": TEXTS[0]}).json()["tokens"]
    (expected,) = embed(server, TEXTS[0])
    for form in ([TEXTS[0]], ids, [ids]):
        assert near(embed(server, form)[0], expected)


def test_many_inputs_come_back_in_their_order(server: Server) -> None:
    """More inputs than run at once, and more than one wave of sequences."""
    inputs = [[3 + (i * j) % 200 for j in range(1, 2 + i % 9)] for i in range(290)]
    together = embed(server, inputs)
    for index in (0, 1, 8, 150, 257, 289):
        assert near(together[index], embed(server, [inputs[index]])[0])
    assert server.wait_idle()["request_success_total{stop}"] >= 290


def test_dimensions_keep_the_first_and_normalise(server: Server) -> None:
    (whole,) = embed(server, TEXTS[0], normalize=False)
    (short,) = embed(server, TEXTS[0], dimensions=16)
    length = math.hypot(*whole[:16])
    assert near(short, [x / length for x in whole[:16]])
    assert not near(whole[:16], short)


def test_what_is_too_long_is_refused_or_cut(server: Server) -> None:
    ids = [5 + i % 50 for i in range(CONTEXT)]
    (fits,) = embed(server, ids)
    body = {"model": MODEL, "input": [*ids, 7]}
    refused = server.post("/v1/embeddings", body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "input",
    )
    assert near(embed(server, [*ids, 7], truncate_prompt_tokens=-1)[0], fits)
    assert near(embed(server, [*ids, 7], truncate_prompt_tokens=9)[0], embed(server, ids[:9])[0])
    text = "word " * 1000
    short = embed(server, text, truncate_prompt_tokens=20)[0]
    assert near(short, embed(server, "word " * 900, truncate_prompt_tokens=20)[0])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("embeddings", {"input": ""}, "input"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ["a", ""]}, "input"),
        ("embeddings", {"input": [[]]}, "input"),
        ("embeddings", {"input": [1, "a"]}, "input"),
        ("embeddings", {"input": [10**9]}, "input"),
        ("embeddings", {"input": [True]}, "input"),
        ("embeddings", {"input": ["a"] * 301}, "input"),
        ("embeddings", {}, "input"),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("embeddings", {"input": "a", "dimensions": 10**6}, "dimensions"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
        ("rerank", {"query": "a"}, "documents"),
        ("rerank", {"query": "", "documents": ["a"]}, "query"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("rerank", {"query": "a", "documents": ["b " * 500]}, "documents"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("score", {"text_1": "a", "text_2": [""]}, "text_2"),
        ("score", {}, "text_1"),
        ("score", {"text_2": "a"}, "text_1"),
        ("score", {"queries": "a"}, "queries"),
        ("score", {"queries": "a", "data_2": "b"}, "queries"),
        ("score", {"queries": ["a", "b"], "documents": ["c"]}, "documents"),
        ("score", {"queries": "a", "documents": "b", "items": "c"}, "items"),
        ("score", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
    ],
)
def test_bad_fields_are_named(server: Server, path: str, fields: dict, param: str) -> None:
    answer = server.post(f"/v1/{path}", {"model": MODEL, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_unknown_fields_are_named_in_the_header(server: Server) -> None:
    answer = server.post("/v1/embeddings", {"model": MODEL, "input": "a", "colour": 1, "user": "u"})
    assert answer.headers["x-quire-ignored-params"] == "colour"
    missing = server.post("/v1/embeddings", {"model": "other", "input": "a"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_orders_by_the_cosine_of_embeddings(server: Server, path: str) -> None:
    query, documents = TEXTS[0], [TEXTS[2], TEXTS[1], query_twin := TEXTS[0]]
    body = {"model": MODEL, "query": query, "documents": [*documents[:2], {"text": query_twin}]}
    answer = server.post(path, {**body, "top_n": 2}).json()
    vectors = embed(server, [query, *documents])
    expected = [cosine(vectors[0], vector) for vector in vectors[1:]]
    order = sorted(range(3), key=lambda i: -expected[i])[:2]
    assert [result["index"] for result in answer["results"]] == order
    assert order[0] == 2
    for result in answer["results"]:
        assert math.isclose(result["relevance_score"], expected[result["index"]], abs_tol=1e-4)
        assert result["document"] == {"text": documents[result["index"]]}
    bare = server.post(path, {**body, "return_documents": False}).json()
    assert len(bare["results"]) == 3
    assert all(set(result) == {"index", "relevance_score"} for result in bare["results"])


def test_score_pairs_one_with_many_or_each_with_each(server: Server) -> None:
    vectors = embed(server, TEXTS)

    def scores(first: object, second: object) -> list[float]:
        answer = server.post("/v1/score", {"model": MODEL, "text_1": first, "text_2": second})
        return [entry["score"] for entry in answer.json()["data"]]

    assert near(
        scores(TEXTS[0], TEXTS[1:]), [cosine(vectors[0], vector) for vector in vectors[1:]], 1e-4
    )
    assert near(scores(TEXTS, TEXTS), [1.0, 1.0, 1.0], 1e-4)


@pytest.mark.parametrize(
    ("one", "other"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores_by_the_other_names_of_the_two_texts(server: Server, one: str, other: str) -> None:
    def scored(one: str, other: str) -> object:
        fields = {one: TEXTS[0], other: TEXTS[1:]}
        return server.post("/v1/score", {"model": MODEL, **fields}).json()["data"]

    assert scored(one, other) == scored("text_1", "text_2")


def test_a_client_that_leaves_frees_its_prompts(server: Server) -> None:
    body = json.dumps({"model": MODEL, "input": [[5 + i % 9] * 120 for i in range(256)]}).encode()
    aborted = server.metrics().get("request_aborted_total", 0.0)
    with server.connect() as sock:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        server.wait_for(lambda m: m["num_requests_running"] > 0, "sequences")
    server.wait_for(lambda m: m.get("request_aborted_total", 0.0) > aborted, "aborts")
    server.wait_idle()
