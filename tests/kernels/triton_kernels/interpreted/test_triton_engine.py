"""The whole engine on the embedded model, with the Triton kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.quantization import selection
from tests import tiny_models
from tests.engine.models.test_parity import paged_logits
from tests.engine.quantization import mxfp4_model
from tests.engine.runner import test_batch_invariant

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


@pytest.mark.slow
def test_experts_in_mxfp4_are_multiplied_as_codes(tmp_path, monkeypatch, caplog) -> None:
    """GPT-OSS as it is published: the logits of its dequantised weights, in the codes' memory."""
    directory, dense = mxfp4_model.save(tmp_path)
    # The check has its own test.
    monkeypatch.setattr(selection, "_triton_unsupported_reason", lambda *_, **__: None)
    expected = paged_logits(dense)
    logits = paged_logits(directory, attention_backend="triton")
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert "experts are held in" not in caplog.text


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_shared"])
def test_layers_with_heads_of_their_own(tmp_path, kind) -> None:
    """Each kind of heads has its own plan; some layers read what others have stored."""
    tiny_models.save(kind, tmp_path, head_dim=16, global_head_dim=32)
    given = {"tokens": list(range(20, 40)), "chunks": (9, 1, 10)}
    expected = paged_logits(tmp_path, attention_backend="reference", **given)
    logits = paged_logits(tmp_path, attention_backend="triton", **given)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_positions_that_are_selected(tmp_path, kind) -> None:
    """In each layer, or in an earlier one; in a chunk, for a single token and beside few tokens."""
    tiny_models.save(kind, tmp_path)
    given = {"tokens": list(range(20, 40)), "chunks": (9, 1, 10)}
    expected = paged_logits(tmp_path, attention_backend="reference", **given)
    logits = paged_logits(tmp_path, attention_backend="triton", **given)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize(
    "kind", ["deepseek_v3", "qwen2_moe", "gpt_oss", "deepseek_v32", "mimo_v2_flash"]
)
def test_experts_are_batch_invariant(tmp_path, kind) -> None:
    """Latent attention, a shared expert with a gate, biases and sinks.

    Each text has the same bits alone and in a batch with its prompt split.
    """
    directory = str(tiny_models.save(kind, tmp_path))
    prompts = [tuple(range(3 + n, 3 + 3 * n)) for n in (2, 9)]
    alone, crowd = (
        test_batch_invariant.make(directory, "float16", backend="triton", **limits)
        for limits in ({}, {"max_num_batched_tokens": 7})
    )
    expected = [test_batch_invariant.answers(alone, [prompt])[0] for prompt in prompts]
    assert test_batch_invariant.answers(crowd, prompts) == expected
