"""The embedded model through Quire's own engine: right on phrasings it was never trained on."""

from __future__ import annotations

import pytest

from demo.evaluate import MAX_NEW_TOKENS, load_heldout, score
from engine import LLM, SamplingParams


@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "fp8"}],
    ids=str,
)
def test_nine_of_ten_held_out_questions_are_answered_exactly(settings):
    entries = load_heldout()
    assert len(entries) == 300
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    with LLM(**settings) as llm:
        prompts = [llm.encode_chat(e["messages"], tools=e.get("tools")) for e in entries]
        results = llm.generate(prompts, greedy, use_tqdm=False)
    answers = [result.outputs[0].text for result in results]
    wrong = [
        (entry["id"], answer)
        for entry, answer in zip(entries, answers, strict=True)
        if not score(entry["expected"], answer)
    ]
    assert len(wrong) <= 30, wrong
