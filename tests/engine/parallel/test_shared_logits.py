"""The logits of a model on several ranks equal Hugging Face's, for every family."""

from __future__ import annotations

import pytest
import torch

from engine.types import SamplingParams
from tests import tiny_kinds, tiny_models
from tests.engine.handmade import Hand, load, request

NUM_TOKENS = 50
CHUNKS = (13, 1, 20, 16)  # with blocks of 4, chunks begin and end within blocks
# They differ from others only in what is not sharded.
LIKE_OTHERS = {
    *("llama_linear", "llama_dynamic", "llama_llama3", "llama_yarn", "llama_longrope"),
    *("smollm", "mistral", "mistral_full", "qwen2_window", "smollm3", "phi4_mini", "cohere2"),
    *("stablelm_parallel", "gpt_neox_serial", "deepseek_v3_halves", "llama4_plain"),
    *("glm", "glm4_moe_lite", "solar_open", "dots1", "ernie4_5", "exaone4", "exaone4_full"),
    *("seed_oss", "internlm3", "iquestcoder", "helium", "ministral", "ministral3", "arcee"),
    *("jais2", "olmo3", "granitemoe", "hyperclovax", "cwm", "exaone_moe", "hy_v3", "mellum"),
    *("mistral4", "vaultgemma", "youtu", "granite_swa", "granitemoe_swa", "gpt_bigcode_by_head"),
    *("phimoe_window", "phi_groups", "gptj", "olmo_unclipped", "cohere2_moe_sigmoid", "nanochat"),
    *("kolibri1", "laguna", "laguna_by_number", "dbrx", "axk1", "flint"),
}
CHANGES = {
    "smollm": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "falcon_one_norm": {"num_kv_heads": 2},
}


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 160, (NUM_TOKENS,), generator=generator).tolist()


def shared_logits(directory, size, **changes) -> torch.Tensor:
    """[tokens, vocab] of a model on ``size`` ranks, in chunks."""
    runner = load(directory, tensor_parallel_size=size, **changes)
    try:
        return logits_of(runner)
    finally:
        runner._team.close()


def logits_of(runner) -> torch.Tensor:
    """[tokens, vocab], in chunks."""
    model, hidden = runner._model, []
    forward = model.forward
    model.forward = lambda *arguments: hidden.append(forward(*arguments)) or hidden[-1]
    hand = Hand(runner)
    hand.add(request("a", prompt(), SamplingParams(prompt_logprobs=0)))
    for count in CHUNKS:
        hand.step({"a": count})
    with torch.inference_mode():
        return model.logits(torch.cat(hidden))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in LIKE_OTHERS else ())
        for kind in tiny_kinds.KINDS
    ],
)
def test_two_ranks_say_what_hugging_face_says(tmp_path, kind):
    model = tiny_models.build(kind, **CHANGES.get(kind, {}))
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(shared_logits(tmp_path, 2), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "size", "changes"),
    [
        # Four ranks have two KV heads: neighbours share one.
        ("qwen2", 4, {"num_attention_heads": 8, "num_key_value_heads": 2}),
        ("olmo2", 4, {"num_attention_heads": 8, "num_key_value_heads": 2}),
        # 160 tokens on three ranks: one has fewer.
        ("gemma2", 3, {"num_key_value_heads": 3, "intermediate_size": 96}),
        ("deepseek_v3", 3, {"intermediate_size": 96}),
        ("gpt_oss", 4, {"num_attention_heads": 8, "num_key_value_heads": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_more_ranks_than_kv_heads_and_an_uneven_vocabulary(tmp_path, kind, size, changes):
    directory = tiny_models.save(kind, tmp_path, **changes)
    expected = logits_of(load(directory))
    torch.testing.assert_close(shared_logits(directory, size), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"quantization": "nf4"},
        {"cache_dtype": "int8"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_rounded_models_are_shared_out(tmp_path, kind, changes):
    """Not to the last bit: scales belong to a rank's own part, and sums are rounded once more."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    directory = tiny_models.save(kind, tmp_path, **shape)
    exact, alone = logits_of(load(directory)), logits_of(load(directory, **changes))
    shared = shared_logits(directory, 2, **changes)
    lost = (alone - exact).pow(2).mean().sqrt()
    assert (shared - exact).pow(2).mean().sqrt() < 1.5 * lost
