"""Texts for prompts with audio equal Hugging Face's, under any chunking and batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from engine.types import Request, SamplingParams
from tests import tiny_audio
from tests.audio_prompts import ask_about, audio_rules_of
from tests.engine.handmade import Hand, load, request

CHUNKS = ((512,), (5, 1, 2, 3, 9, 512), (7,) * 40)


class Twin:
    """A tiny Hugging Face model, saved for our engine."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.model = tiny_audio.save(kind, directory)
        self.directory = directory
        self.rules = audio_rules_of(directory)

    def logits(self, asked: Request, more: list[int] | tuple[int, ...] = ()) -> torch.Tensor:
        """[tokens, vocab], for a prompt and the generated tokens."""
        with torch.no_grad():
            return self.model(**self._inputs(asked, more)).logits[0]

    def greedy(self, asked: Request, count: int) -> list[int]:
        found: list[int] = []
        for _ in range(count):
            found.append(int(self.logits(asked, found)[-1].argmax()))
        return found

    def _inputs(self, asked: Request, more: list[int] | tuple[int, ...]) -> dict[str, Any]:
        ids = torch.tensor([[*asked.prompt_token_ids, *more]])
        found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not asked.audio:
            return found
        clips = [np.frombuffer(clip.samples, np.float32) for clip in asked.audio]
        extract = tiny_audio.extractor(self.kind)
        options: dict[str, Any] = {"sampling_rate": tiny_audio.RATE, "return_tensors": "pt"}
        if self.kind == "voxtral":
            return found | {"input_features": extract(clips, **options)["input_features"]}
        # Each by itself: in a batch, the extractor sees silence behind the shorter ones.
        padding = True if self.kind == "qwen3_asr" else "max_length"
        options |= {"return_attention_mask": True, "padding": padding}
        each = [extract(clip, **options) for clip in clips]
        seen, masks = (
            [one["input_features"][0] for one in each],
            [one["attention_mask"][0] for one in each],
        )
        most = max(one.shape[-1] for one in seen)
        mask = "input_features_mask" if self.kind == "qwen3_asr" else "feature_attention_mask"
        return found | {
            "input_features": torch.stack([pad(one, (0, most - one.shape[-1])) for one in seen]),
            mask: torch.stack([pad(one, (0, most - one.shape[-1])) for one in masks]),
        }


@pytest.fixture(scope="module", params=list(tiny_audio.KINDS))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_of_a_prompt_with_audio(twin: Twin) -> None:
    asked = ask_about("a", twin.rules, sampling=SamplingParams(prompt_logprobs=0))
    wanted = twin.logits(asked)
    length = len(asked.prompt_token_ids)
    for chunks in CHUNKS:
        runner = load(twin.directory)
        model: Any = runner._model
        hidden: list[torch.Tensor] = []
        forward = model.forward
        model.forward = lambda *given, to=forward, into=hidden: into.append(to(*given)) or into[-1]
        hand = Hand(runner)
        hand.add(asked)
        start = 0
        for count in chunks:
            end = min(start + count, length)
            if start < end:
                hand.step({"a": end - start})
            start = end
        with torch.inference_mode():
            found = model.logits(torch.cat(hidden))
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_the_text_behind_audio_goes_on(twin: Twin) -> None:
    """In a batch with a text without audio and one with other audio."""
    hand = Hand(load(twin.directory))
    asked = [ask_about("a", twin.rules, 0), ask_about("b", twin.rules, 1), request("c", [9, 4, 2])]
    for each in asked:
        hand.add(each)
    hand.step({each.id: len(each.prompt_token_ids) for each in asked})
    for _ in range(7):
        hand.step({each.id: 1 for each in asked})
    texts = []
    for each in asked:
        text = hand.tokens[each.id][len(each.prompt_token_ids) :]
        assert text == twin.greedy(each, 8)
        texts.append(tuple(text))
    assert len(set(texts)) == 3
