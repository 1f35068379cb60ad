"""The whole engine on the model that ships with it, through the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, SamplingParams

MODEL = Path(__file__).parents[4] / "demo" / "model"
PROMPTS = ["What is the capital of France?", "Name three colours, as a list of JSON strings."]


def answers(backend: str) -> list[str]:
    llm = LLM(
        MODEL,
        attention_backend=backend,
        dtype="float32",
        max_model_len=128,
        num_gpu_blocks_override=32,
        num_threads=1,
        use_tqdm=False,
    )
    results = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=5))
    return [result.outputs[0].text for result in results]


@pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="the model is not built")
def test_greedy_text_is_the_references() -> None:
    assert answers("triton") == answers("reference")
