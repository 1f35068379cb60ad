"""Images on a GPU: embedded in a step that does not wait, followed by captured steps."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from engine.types import Request, SamplingParams
from tests import tiny_vision
from tests.image_prompts import ask, rules_of
from tests.pretended_gpu.engines import config_of, on_cpu, on_pretended_gpu, texts

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "eager"), list(itertools.product(tiny_vision.KINDS, ("none", "main")))
)
def test_texts_about_images_are_those_of_a_cpu(kind: str, eager: str, tmp_path: Path) -> None:
    tiny_vision.save(kind, tmp_path)
    rules, rng = rules_of(tmp_path), random.Random(1)
    requests = [ask("a", rules, 0, GREEDY), ask("b", rules, 1, GREEDY, ((1, 2),))]
    prompt = tuple(rng.randrange(3, 140) for _ in range(9))
    requests.append(Request(id="c", prompt_token_ids=prompt, sampling=GREEDY))
    config = config_of(str(tmp_path))
    expected = on_cpu(config, requests)
    with on_pretended_gpu(config, eager) as rig:
        assert texts(rig.core, requests) == expected
