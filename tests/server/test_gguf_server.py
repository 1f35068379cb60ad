"""A server on the demo model as a single GGUF file: the same answers as from its directory."""

from __future__ import annotations

import gguf
import pytest
import transformers

from engine.paths import default_model_dir
from tests import gguf_files
from tests.servers import running_server

QUESTIONS = ("What is the capital of France?", "What is paged attention?", "Who are you?")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    directory = default_model_dir()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="bfloat16")
    return gguf_files.write(
        tmp_path_factory.mktemp("gguf") / "quire-demo.gguf",
        model,
        gguf_files.as_type(gguf.GGMLQuantizationType.BF16),
        directory,
        lambda writer: writer.add_sampling_temp(0.0),
    )


def test_answers_are_those_of_the_directory(server, file, tmp_path):
    with running_server(tmp_path / "server.log", str(file)) as other:
        assert other.get("/v1/models").json()["data"][0]["id"] == "quire-demo"
        for question in QUESTIONS:
            expected, found = (one.chat(question).json() for one in (server, other))
            assert found["choices"] == expected["choices"]
            assert found["usage"] == expected["usage"]
        plain = "It's 1984:\tthe <|im_end|> of naïveté — 東京 🙂\n\n"
        body = {"model": "quire-demo", "prompt": plain}
        assert (
            other.post("/tokenize", body).json()["tokens"]
            == server.post("/tokenize", body).json()["tokens"]
        )
        # The file's defaults for unspecified parameters: here, greedy decoding.
        again = [
            other.complete("The capital of", max_tokens=8, temperature=None).json()["choices"]
            for _ in range(2)
        ]
        assert again[0] == again[1]
