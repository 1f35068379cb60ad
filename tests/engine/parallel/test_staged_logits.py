"""The logits of a model in pipeline stages equal Hugging Face's, for every family."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ModelLoadError
from engine.types import SamplingParams
from tests import gguf_files, tiny_kinds, tiny_models
from tests.engine.handmade import Hand, load, request
from tests.engine.parallel.test_shared_logits import (
    CHANGES,
    CHUNKS,
    LIKE_OTHERS,
    logits_of,
    prompt,
)
from tests.engine.quantization.test_formats import _write

# A layer that shares a selection would be in its indexer's stage, and halves of a layer in one.
IN_THREE_STAGES = {
    "glm_moe_dsa": {"indexer_types": ["full"] * 3},
    "longcat_flash": {"num_layers": 3},
}


def staged_logits(directory, stages, size=1, **changes) -> torch.Tensor:
    """[tokens, vocab] of a model in ``stages`` of ``size`` ranks each, in chunks."""
    runner = load(directory, pipeline_parallel_size=stages, tensor_parallel_size=size, **changes)
    hidden, fetch = [], runner._pipeline.receive_result
    runner._pipeline.receive_result = lambda count: hidden.append(fetch(count)) or hidden[-1]
    hand = Hand(runner)
    hand.add(request("a", prompt(), SamplingParams(prompt_logprobs=0)))
    try:
        for count in CHUNKS:
            hand.step({"a": count})
        with torch.inference_mode():
            return runner._model.logits(torch.cat(hidden))
    finally:
        runner._team.close()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in LIKE_OTHERS else ())
        for kind in tiny_kinds.KINDS
    ],
)
def test_three_stages_say_what_hugging_face_says(tmp_path, kind):
    """Each has one layer, so everything between two layers is sent between processes."""
    model = tiny_models.build(kind, **IN_THREE_STAGES.get(kind, {}))
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(staged_logits(tmp_path, 3), expected, atol=1e-4, rtol=0)


# Tied embeddings, learned positions, sharded norms, windows and soft caps, experts in some layers,
# latents, both norms of a layer at once, a selection that two layers share.
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2", "gpt2", "olmo2", "gemma2", "qwen2_moe", "deepseek_v3", "gpt_neox"),
        "glm_moe_dsa",
    ],
)
def test_two_stages_of_two_ranks(tmp_path, kind):
    model = tiny_models.build(kind, **CHANGES.get(kind, {}))
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(staged_logits(tmp_path, 2, 2), expected, atol=1e-4, rtol=0)


def test_whole_experts_of_a_stage(tmp_path):
    model = tiny_models.build("mixtral")
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    said = staged_logits(tmp_path, 2, 2, enable_expert_parallel=True)
    torch.testing.assert_close(said, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"quantization": "nf4"},
        {"cache_dtype": "int8"},
        {"load_format": "dummy"},
        {"batch_invariant": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_a_stage_computes_what_its_layers_do_in_one_process(tmp_path, changes):
    """Bit for bit, since nothing is summed over ranks."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    directory = tiny_models.save("qwen2", tmp_path, **shape)
    alone = logits_of(load(directory, enforce_eager=True, **changes))
    torch.testing.assert_close(staged_logits(directory, 2, **changes), alone, atol=0, rtol=0)


@pytest.mark.parametrize("written", ["gptq4_act", "awq"])
def test_codes_of_files(tmp_path, monkeypatch, written):
    """With any groups, since no stage has part of a matrix."""
    monkeypatch.setattr("kernels.cpu.linear.is_available", lambda: False)  # to the last bits
    shape = {"hidden_size": 128, "intermediate_size": 256}
    directory, expected = _write("llama", written, tmp_path, **shape)
    torch.testing.assert_close(staged_logits(directory, 2), expected, atol=1e-4, rtol=0)


def test_gguf_files(tmp_path):
    model = tiny_models.build("qwen2_moe", mlp_only_layers=[])
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    path = gguf_files.write(tmp_path / "model.gguf", model)
    torch.testing.assert_close(staged_logits(path, 3), expected, atol=1e-4, rtol=0)


def test_more_stages_than_layers_are_refused(tmp_path):
    directory = tiny_models.save("qwen3", tmp_path)
    with pytest.raises(ModelLoadError, match=r"^pipeline_parallel_size 4: the model has 3 layers$"):
        load(directory, pipeline_parallel_size=4)
