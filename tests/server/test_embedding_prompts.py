"""Prompts of sentence-transformers over HTTP, and a reranker that is a language model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests import tiny_encoders
from tests.engine.pooling import test_logit_scores, test_prompts
from tests.engine.pooling.test_logit_scores import DOCUMENTS, QUERY, log_odds, prompt_ids
from tests.servers import Server, running_server

NAME = "tiny"
__all__ = ["log_odds"]  # a fixture


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("prompted") / NAME
    tiny_encoders.save("bert", directory)
    tiny_encoders.save_tokenizer(directory)
    test_prompts.configure(directory, prompts=test_prompts.PROMPTS, default_prompt_name=None)
    log = tmp_path_factory.mktemp("prompted_log") / "log"
    with running_server(log, str(directory), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = test_logit_scores.save(tmp_path_factory.mktemp("reranker") / NAME)
    log = tmp_path_factory.mktemp("reranker_log") / "log"
    flags = ("--dtype", "float32", "--max-model-len", "256")
    with running_server(log, str(directory), *flags) as running:
        yield running


def embed(server: Server, inputs: Any, **fields: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"model": NAME, "input": inputs, **fields})
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-params" not in answer.headers
    return [entry["embedding"] for entry in answer.json()["data"]]


def test_the_sdk_names_a_prompt_in_its_extra_body(server: Server) -> None:
    (expected,) = embed(server, "the cat: a dog")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(
            model=NAME, input="a dog", extra_body={"prompt_name": "query"}
        )
    assert answer.data[0].embedding == pytest.approx(expected, abs=1e-5)
    # [CLS], the prompt's three tokens, the text's four (a, d, ##o, ##g is dog) and [SEP]
    assert answer.usage.prompt_tokens == len(["CLS", "the", "cat", "?", "a", "dog", "SEP"])


@pytest.mark.parametrize("field", ["input_type", "task"])
def test_other_servers_names_of_the_field(server: Server, field: str) -> None:
    (expected,) = embed(server, "a dog", prompt_name="query")
    assert embed(server, "a dog", **{field: "query"})[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"prompt_name": "passage"}, "prompt_name", "'query', 'document'"),
        ({"input_type": "search_query"}, "input_type", "'query', 'document'"),
        ({"task": "retrieval.query"}, "task", "'query', 'document'"),
        ({"prompt_name": "query", "task": "query"}, "task", "combined with 'prompt_name'"),
        ({"prompt_name": "query", "input": [5, 6]}, "prompt_name", "token ids"),
        ({"prompt_name": 3}, "prompt_name", "string"),
        ({"late_chunking": True}, "late_chunking", "vector of its own"),
        ({"embedding_type": "binary"}, "embedding_type", "float32"),
        ({"embedding_types": ["float", "int8"]}, "embedding_types", "float32"),
        ({"output_dtype": "int8"}, "output_dtype", "float32"),
        ({"output_dimension": 16}, "output_dimension", "'dimensions'"),
    ],
)
def test_what_would_be_another_vector_is_refused(
    server: Server, fields: dict[str, Any], param: str, told: str
) -> None:
    answer = server.post("/v1/embeddings", {"model": NAME, "input": "a dog", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert told in error["message"]


def test_an_instruction_is_refused_where_pairs_are_no_messages(server: Server) -> None:
    body = {"model": NAME, "query": "the cat", "documents": ["a dog"], "instruction": "Judge"}
    error = server.post("/v1/rerank", body).json()["error"]
    assert (error["param"], error["type"]) == ("instruction", "invalid_request_error")


def test_other_servers_switches_cut_what_is_too_long(server: Server) -> None:
    long = "a cat " * 200
    (expected,) = embed(server, long, truncate_prompt_tokens=-1)
    for fields in ({"truncate": True}, {"truncate": "END"}, {"truncation": True}):
        assert embed(server, long, **fields)[0] == pytest.approx(expected, abs=1e-5)
    for fields in ({"truncate": False}, {"truncate": "NONE"}, {"truncation": False}):
        answer = server.post("/v1/embeddings", {"model": NAME, "input": long, **fields})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    body = {"model": NAME, "query": "the cat", "documents": [long], "truncation": True}
    assert server.post("/v1/rerank", body).status_code == 200
    refused = server.post("/v1/embeddings", {"model": NAME, "input": "a", "truncate": "START"})
    assert refused.json()["error"]["param"] == "truncate"


def test_defaults_of_such_fields_change_nothing(server: Server) -> None:
    (plain,) = embed(server, "a dog")
    fields = {"late_chunking": False, "embedding_type": "float", "embedding_types": ["float"]}
    fields |= {"output_dtype": None, "input_type": None, "task": None, "prompt_name": ""}
    assert embed(server, "a dog", **fields)[0] == pytest.approx(plain, abs=1e-5)


def test_a_language_model_ranks_by_its_logits(reranker: Server, log_odds: Any) -> None:
    documents = [*DOCUMENTS, "Rome is in Italy."]
    body = {"model": NAME, "query": QUERY, "documents": documents}
    answer = reranker.post("/v1/rerank", body)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    found = {result["index"]: result["relevance_score"] for result in results}
    assert list(found) == sorted(found, key=lambda index: -found[index])
    for index in (0, 1, 3):
        expected = 1 / (1 + math.exp(-log_odds(prompt_ids(documents[index]))))
        assert math.isclose(found[index], expected, abs_tol=1e-4)
    long = {**body, "documents": ["Paris. " * 400]}
    assert reranker.post("/v1/rerank", long).json()["error"]["code"] == "context_length_exceeded"
    cut = reranker.post("/v1/rerank", {**long, "truncate_prompt_tokens": -1}).json()
    assert 240 < cut["usage"]["total_tokens"] <= 256
    longer = {**body, "documents": ["Paris. " * 300_000], "truncate": True}
    whole = reranker.post("/v1/rerank", longer).json()
    assert whole["results"][0]["relevance_score"] == pytest.approx(
        cut["results"][0]["relevance_score"], abs=1e-4
    )
    query = {**body, "query": "Paris. " * 300_000, "truncate": True}
    assert reranker.post("/v1/rerank", query).json()["error"]["code"] == "context_length_exceeded"
    asked = reranker.post("/v1/rerank", {**body, "instruction": "Judge the style"}).json()
    (paris,) = (r["relevance_score"] for r in asked["results"] if r["index"] == 0)
    odds = log_odds(prompt_ids(documents[0], "Judge the style"))
    assert math.isclose(paris, 1 / (1 + math.exp(-odds)), abs_tol=1e-4)
    # Vectors of it are those of a decoder, and it writes.
    assert len(embed(reranker, "Hello")) == 1
    chat = {"model": NAME, "messages": [{"role": "query", "content": "x"}], "max_tokens": 2}
    assert reranker.post("/v1/chat/completions", chat).status_code == 400
    completion = {"model": NAME, "prompt": "Hello", "max_tokens": 2}
    assert reranker.post("/v1/completions", completion).status_code == 200
