"""A server on a stateful model with random weights: its answers equal Hugging Face's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from engine.paths import default_model_dir
from tests import tiny_models
from tests.servers import running_server

PROMPT = "The capital of France is the city in which most of its people live: "
NUM_OUTPUT = 120


TWO_RANKS = ("--tensor-parallel-size", "2")
FOUR_RANKS = (*TWO_RANKS, "--pipeline-parallel-size", "2")
DRAFTING = ("--speculation", "ngram", "--prompt-lookup-min", "1")
LAYERS = ["linear_attention", "full_attention"] * 2


@pytest.fixture(
    scope="module",
    params=[
        (),
        DRAFTING,
        pytest.param(TWO_RANKS, marks=pytest.mark.slow),
        pytest.param(FOUR_RANKS, marks=pytest.mark.slow),
    ],
    ids=["alone", "with drafts", "two ranks", "four ranks"],
)
def served(request, tmp_path_factory):
    """(server, its model's directory, the prompt's tokens and Hugging Face's continuation)."""
    directory, demo = tmp_path_factory.mktemp("hybrid"), default_model_dir()
    size = json.loads((demo / "config.json").read_text())["vocab_size"]
    shape = {"num_hidden_layers": 4, "layer_types": LAYERS, "max_position_embeddings": 512}
    twin = tiny_models.build("qwen3_5_text", vocab_size=size, **shape)
    twin.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, directory)
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ("--dtype", "float32", "--served-model-name", "tiny", *request.param)
    with running_server(log, str(directory), *options) as server:
        ids = server.post("/tokenize", {"model": "tiny", "prompt": PROMPT}).json()["tokens"]
        yield server, directory, ids, tiny_models.greedy_tokens(twin, ids, NUM_OUTPUT)


def asked(ids: list[int], **fields: object) -> dict[str, object]:
    return {
        **{"prompt": ids, "max_tokens": NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True},
        **{"model": "tiny", "return_token_ids": True, **fields},
    }


def test_texts_are_hugging_faces_alone_and_together(served):
    server, _, ids, expected = served
    assert server.post("/v1/completions", asked(ids)).status_code == 200  # caches its prompt
    for count in (1, 3):
        answer = server.post("/v1/completions", asked(ids, n=count)).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * count
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > len(ids) // 2
    assert "states of 256 sequences" in server.log.read_text()
    metrics = server.metrics()
    assert 0 < metrics["state_snapshots_used"] <= metrics["state_snapshots_total"]


@pytest.mark.slow
def test_a_stream_goes_on_when_the_engine_dies(served):
    server, _, ids, expected = served
    body, found = {**asked(ids), "stream": True}, []
    with server._client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not found:
                server.engines()[0].kill()
            found += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    assert found == expected


def test_what_a_state_does_not_bear_is_refused_in_a_line(served):
    _, directory, _, _ = served
    command = [sys.executable, "-m", "server", "serve", str(directory), "--port", "0"]
    refused = subprocess.run(
        [*command, *DRAFTING, *TWO_RANKS], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode != 0
    assert "speculation 'ngram': qwen3_5_text models keep a state of each seq" in refused.stderr
