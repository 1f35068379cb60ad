"""GGUF files of tiny random models: the same logits as the models that they were written from."""

from __future__ import annotations

import pytest
import torch

from engine.types import SamplingParams
from tests import gguf_files, tiny_models
from tests.engine.handmade import Hand, load, request

NUM_TOKENS = 40

# Only what the files can tell: scores of Gemma are scaled as its heads are wide, and windows of
# Qwen and Mistral are not written down.
CHANGES = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_hidden_layers": 6,
        "sliding_window": 12,
    },
    "cohere2": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
    },
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "qwen2_moe": {"mlp_only_layers": []},
}
KINDS = sorted(
    set(tiny_models.KINDS)
    - {"mistral", "qwen2_window", "llama_dynamic", "llama_longrope", "qwen3_moe_raw"}
    - {kind for kind in tiny_models.KINDS if "gpt_oss" in kind}
)


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 160, (NUM_TOKENS,), generator=generator).tolist()


def logits_of(path, **changes) -> torch.Tensor:
    runner = load(path, **changes)
    model, hidden = runner._model, []
    forward = model.forward
    model.forward = lambda *arguments: hidden.append(forward(*arguments)) or hidden[-1]
    hand = Hand(runner)
    hand.add(request("a", prompt(), SamplingParams(prompt_logprobs=0)))
    for count in (13, 1, 26):
        hand.step({"a": count})
    with torch.inference_mode():
        return model.logits(torch.cat(hidden))


def logits_of_twin(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt()])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_source(kind, tmp_path):
    model = tiny_models.build(kind, **CHANGES.get(kind, {}))
    path = gguf_files.write(tmp_path / "model.gguf", model)
    expected = logits_of_twin(model)
    torch.testing.assert_close(logits_of(path), expected, atol=1e-4, rtol=1e-4)
