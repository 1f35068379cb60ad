"""Images on several ranks: rank 0 embeds them and sends the embeddings to all of its stage."""

from __future__ import annotations

import pytest

from engine.types import Request, SamplingParams
from tests import tiny_vision
from tests.engine.parallel.test_shared_texts import engine, texts_of
from tests.image_prompts import ask, rules_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
# Two ranks have a KV head each; of four layers three may receive image features.
LAYERS = {"num_hidden_layers": 4, "num_key_value_heads": 2}
TEXTS = {
    "qwen2_5_vl": LAYERS,
    "qwen3_vl": LAYERS,
    "mistral3": LAYERS,
    "gemma3": {**LAYERS, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": {},
    "gemma4_plain": {"num_key_value_heads": 2},
    "idefics3": LAYERS,
    "internvl": LAYERS,
    "qwen3_5": {**LAYERS, "layer_types": ["linear_attention", "full_attention"] * 2},
}


def requests_of(directory) -> list[Request]:
    rules = rules_of(directory)
    plain = Request(id="c", prompt_token_ids=(9, 4, 2, 30), sampling=GREEDY)
    return [ask("a", rules, 0, GREEDY), ask("b", rules, 1, GREEDY, ((2, 3),)), plain]


@pytest.mark.parametrize(
    ("kind", "size", "stages"),
    [
        *(("qwen2_5_vl", 2, 1), ("qwen3_vl", 2, 1), ("mistral3", 2, 1), ("qwen3_5", 2, 1)),
        *(("qwen2_5_vl", 1, 2), ("qwen3_vl", 1, 2)),
        *(("idefics3", 2, 1), ("internvl", 1, 2)),
        *(("gemma3", 2, 1), ("gemma4_plain", 2, 1), ("gemma4", 1, 2)),
        pytest.param("qwen3_vl", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_one_process(tmp_path, kind, size, stages):
    """In chunks that split images, and again from the prefix cache."""
    tiny_vision.save(kind, tmp_path, text=TEXTS[kind])
    requests = requests_of(tmp_path)
    alone = engine(tmp_path, 1)[0]
    for request in requests:
        alone.add(request)
    expected = texts_of(alone)
    assert len({tuple(text) for text in expected.values()}) == 3
    core, runner = engine(tmp_path, size, stages, max_num_batched_tokens=7)
    assert core.info.images is not None
    for _ in range(2):
        for request in requests:
            core.add(request)
        assert texts_of(core) == expected
    assert core.stats.prefix_cache_hits
    del core, runner


def test_a_stage_too_short_for_what_it_is_told_takes_no_images(tmp_path, caplog):
    caplog.set_level("INFO")
    tiny_vision.save("qwen3_vl", tmp_path, text={**LAYERS, "num_hidden_layers": 2})
    core, _ = engine(tmp_path, 1, 2)
    assert core.info.images is None
    assert "images are not taken: 2 layers are told of them, and 1 could be" in caplog.text
    core.add(Request(id="a", prompt_token_ids=(9, 4, 2), sampling=GREEDY))
    assert len(texts_of(core)["a"]) == 10
