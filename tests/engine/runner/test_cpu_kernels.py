"""The whole engine on the embedded model, with the CPU kernels and without them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from kernels.cpu.native import build

MODEL = Path(__file__).parents[3] / "demo" / "model"
PROMPTS = ["What is the capital of France?", "Name three colours, as a list of JSON strings."]

pytestmark = pytest.mark.skipif(
    not (MODEL / "model.safetensors").exists(), reason="the model is not built"
)


def answers(backend: str) -> list[str]:
    llm = LLM(
        MODEL,
        attention_backend=backend,
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=32,
        use_tqdm=False,
    )
    results = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))
    return [result.outputs[0].text for result in results]


@pytest.mark.skipif(build.load() is None, reason="no native kernels here")
def test_greedy_text_is_the_references() -> None:
    assert answers("cpu") == answers("reference")


def test_without_the_library_the_reference_answers_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise build.BuildError("no C++ compiler")

    monkeypatch.setattr(build, "open_library", refuse)
    with caplog.at_level(logging.INFO):
        texts = answers("auto")
    assert all(texts)
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "attention backend cpu: not used, no C++ compiler" in warning.getMessage()
    assert "attention backend: reference" in caplog.text
    assert "triton" not in caplog.text  # on a CPU it is never chosen
