"""Texts for prompts with images equal Hugging Face's, under any chunking and batching."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec
from engine.types import SamplingParams
from tests import tiny_vision, tiny_vision_pixels
from tests.engine.handmade import Hand, load, request
from tests.image_prompts import CANVAS_SIZES, ask, rules_of

CHUNKS = ((64,), (5, 1, 2, 3, 9, 64), (1,) * 64)


class Twin:
    """A tiny Hugging Face model, saved for our engine."""

    def __init__(self, kind, directory):
        self.model = tiny_vision.save(kind, directory)
        self.directory = directory
        self.rules = rules_of(directory)
        spec = read_config(str(directory)).spec
        self.sees_both_ways = isinstance(spec, DecoderSpec) and spec.bidirectional_images
        self._processor = tiny_vision_pixels.processor(kind)

    def uncut(self, asked, end):
        """Where a step that would end here may end: not in images with bidirectional attention."""
        for image in asked.images if self.sees_both_ways else ():
            if image.start < end < image.start + image.num_tokens:
                return image.start + image.num_tokens
        return end

    def logits(self, asked, more=()):
        """[tokens, vocab], for a prompt and the generated tokens."""
        with torch.no_grad():
            return self.model(**self._inputs(asked, more)).logits[0]

    def continues(self, asked, tokens):
        """Whether these tokens are its greedy continuation of a prompt."""
        chosen = self.logits(asked, tokens[:-1])[len(asked.prompt_token_ids) - 1 :].argmax(-1)
        return chosen.tolist() == tokens

    def _inputs(self, asked, more):
        ids = torch.tensor([[*asked.prompt_token_ids, *more]])
        if not asked.images:
            return {"input_ids": ids}
        arrays = [
            np.frombuffer(each.pixels, np.uint8).reshape(each.height, each.width, 3)
            for each in asked.images
        ]
        if hasattr(self._processor, "image_grid_pinpoints"):
            return {"input_ids": ids, **self._canvases(arrays)}
        found = tiny_vision_pixels.seen(self._processor, arrays)
        model_type = self.model.config.model_type
        if model_type == "gemma3":
            found["token_type_ids"] = (ids == self.rules.token_id).long()
        elif "omni" in model_type:
            found["attention_mask"] = torch.ones_like(ids)
        elif model_type.startswith(("gemma4", "qwen", "glm", "paddle")):
            found["mm_token_type_ids"] = (ids == self.rules.token_id).long()
        return {"input_ids": ids, **found}

    def _canvases(self, arrays):
        """Of images that are a view and a canvas each."""
        cut = tiny_vision_pixels.tiles(self._processor, arrays)
        shown = [torch.cat(pair) for pair in zip(cut[::2], cut[1::2], strict=True)]
        most = max(len(tiles) for tiles in shown)
        values = torch.zeros(len(shown), most, *shown[0].shape[1:])
        for tiles, into in zip(shown, values, strict=True):
            into[: len(tiles)] = tiles
        return {"pixel_values": values, "image_sizes": torch.tensor(CANVAS_SIZES[: len(shown)])}


@pytest.fixture(scope="module", params=list(tiny_vision.KINDS))
def twin(request, tmp_path_factory):
    return Twin(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_logits_of_a_prompt_with_images(twin, chunks):
    asked = ask("a", twin.rules, sampling=SamplingParams(prompt_logprobs=0))
    runner = load(twin.directory)
    model, hidden = runner._model, []
    forward = model.forward
    model.forward = lambda *arguments: hidden.append(forward(*arguments)) or hidden[-1]
    hand = Hand(runner)
    hand.add(asked)
    start, length = 0, len(asked.prompt_token_ids)
    for count in chunks:
        if start < length:
            end = twin.uncut(asked, min(start + count, length))
            hand.step({"a": end - start})
            start = end
    with torch.inference_mode():
        found = model.logits(torch.cat(hidden))
    # Sums are rounded in another order, which differs by processor; most by layers with a state.
    torch.testing.assert_close(found, twin.logits(asked), atol=3e-4, rtol=0)


def test_the_text_behind_images_goes_on(twin):
    """In a batch with a text without images and one with others."""
    hand = Hand(load(twin.directory))
    asked = [ask("a", twin.rules, 0), ask("b", twin.rules, 1), request("c", [9, 4, 2])]
    for each in asked:
        hand.add(each)
    hand.step({each.id: len(each.prompt_token_ids) for each in asked})
    for _ in range(11):
        hand.step({each.id: 1 for each in asked})
    for each in asked:
        count = len(each.prompt_token_ids)
        tokens = list(hand.tokens[each.id][count:])
        assert len(tokens) == 12
        assert twin.continues(each, tokens)


def test_another_image_is_another_text(twin):
    hand = Hand(load(twin.directory))
    texts = []
    for number in range(3):
        asked = ask(str(number), twin.rules, seed=number)
        hand.add(asked)
        texts.append(tuple(hand.decode(asked.id, 8)))
    assert len(set(texts)) == 3
