"""The embedded model in Quire's own engine: right on phrasings it was never trained on."""

from __future__ import annotations

from typing import Any

import pytest

from demo.evaluate import MAX_NEW_TOKENS, load_heldout, score
from engine import LLM, SamplingParams
from engine.results import LLMStats


def _answers(**settings: Any) -> tuple[list[str], LLMStats]:
    entries = load_heldout()[:: settings.pop("every", 1)]
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    with LLM(dtype="float32", **settings) as llm:
        prompts = [llm.encode_chat(e["messages"], tools=e.get("tools")) for e in entries]
        results = llm.generate(prompts, greedy, use_tqdm=False)
        return [result.outputs[0].text for result in results], llm.stats()


@pytest.mark.parametrize(
    "every", [10, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_speculation_changes_no_answer(every):
    """With its own draft, n-grams and suffixes; and the draft is right more often than not."""
    expected, _ = _answers(every=every)
    for method in ("draft", "ngram", "suffix"):
        answers, stats = _answers(every=every, speculation=method)
        assert answers == expected
        if method == "draft":
            drafts = stats.engine.drafts
            assert drafts.num_accepted_tokens > drafts.num_draft_tokens / 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "int4"},
        pytest.param({"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
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
