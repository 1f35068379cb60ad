"""A server with a cross-encoder: it scores pairs, embeds, and rejects text generation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests import tiny_encoders
from tests.servers import Server, running_server

NAME = "tiny"
QUERY = "the cat sat"
DOCUMENTS = ["a dog", "cats sitting on a mat, in the sun!", "the the the", "a cat? 42"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hugging Face's twin, saved in ``model.directory``."""
    directory = tmp_path_factory.mktemp("encoder") / NAME
    twin = tiny_encoders.save("bert", directory, num_labels=1)
    tiny_encoders.save_tokenizer(directory)
    twin.directory = directory
    return twin


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("encoder_log") / "log"
    with running_server(log, str(model.directory), "--dtype", "float32") as running:
        yield running


def expected_scores(model: Any, pairs: list[tuple[str, str]]) -> list[float]:
    tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    scores = []
    for pair in pairs:
        encoding = tokenizer.encode(*pair)
        with torch.no_grad():
            logits = model(
                torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
            ).logits
        scores.append(torch.sigmoid(logits[0, 0]).item())
    return scores


def test_the_head_ranks_documents(server: Server, model: Any) -> None:
    body = {"model": NAME, "query": QUERY, "documents": DOCUMENTS}
    answer = server.post("/v1/rerank", body)
    assert answer.status_code == 200, answer.text
    expected = expected_scores(model, [(QUERY, document) for document in DOCUMENTS])
    results = answer.json()["results"]
    assert [r["index"] for r in results] == sorted(range(4), key=lambda i: -expected[i])
    for result in results:
        score = expected[result["index"]]
        assert math.isclose(result["relevance_score"], score, abs_tol=1e-5)
    assert answer.json()["usage"]["total_tokens"] > 40
    scored = server.post("/v1/score", {"model": NAME, "text_1": QUERY, "text_2": DOCUMENTS})
    assert [entry["index"] for entry in scored.json()["data"]] == [0, 1, 2, 3]
    for entry, score in zip(scored.json()["data"], expected, strict=True):
        assert math.isclose(entry["score"], score, abs_tol=1e-5)


def test_a_pair_that_is_too_long_loses_the_end_of_its_document(server: Server, model: Any) -> None:
    long = "a cat " * 100
    body = {"model": NAME, "query": QUERY, "documents": [long]}
    refused = server.post("/v1/rerank", body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    answer = server.post("/v1/rerank", {**body, "truncate_prompt_tokens": -1})
    fits = "a cat " * 61  # 128 tokens with the query's three and three around them
    (score,) = expected_scores(model, [(QUERY, fits)])
    (result,) = answer.json()["results"]
    assert answer.json()["usage"]["total_tokens"] == 128
    assert math.isclose(result["relevance_score"], score, abs_tol=1e-5)


def test_embeddings_keep_the_special_tokens_of_a_cut_text(server: Server) -> None:
    def embed(text: str, **fields: Any) -> list[float]:
        answer = server.post("/v1/embeddings", {"model": NAME, "input": text, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["embedding"]

    cut = embed("the cat sat " * 20, truncate_prompt_tokens=8)
    whole = embed("the cat sat " * 2)
    assert all(math.isclose(x, y, abs_tol=1e-5) for x, y in zip(cut, whole, strict=True))
    assert math.isclose(math.hypot(*whole), 1.0, abs_tol=1e-5)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
    ],
)
def test_what_generates_says_that_this_model_does_not(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    answer = server.post(path, {"model": NAME, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert "does not generate" in error["message"]


def test_the_start_shows_what_can_be_asked(server: Server) -> None:
    told = server.log.read_text()
    assert f"curl {server.url}/v1/embeddings" in told
    assert '{"model": "tiny", "input": ' in told
    assert "no KV cache" in told


def test_tokens_are_told_and_put_together_again(server: Server) -> None:
    tokens = server.post("/tokenize", {"model": NAME, "prompt": "The cats sat"}).json()["tokens"]
    text = server.post("/detokenize", {"model": NAME, "tokens": tokens[1:-1]}).json()["prompt"]
    assert text == "the cats sat"
