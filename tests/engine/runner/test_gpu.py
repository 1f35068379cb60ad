"""The reference backend gives the same results on a GPU as on the CPU."""

from __future__ import annotations

import pytest
import torch

from engine.types import SamplingParams
from kernels.reference.sampling import exponential_noise
from tests import tiny_models
from tests.engine.handmade import GREEDY, Hand, load, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PARAMETERS = {
    "greedy": GREEDY,
    "penalised": SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={9: 4.0}),
    "random": SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=3, min_tokens=5),
}


@pytest.mark.parametrize("kind", ["llama_bias", "mistral", "qwen3"])
def test_text_equals_that_of_the_cpu(kind, tmp_path):
    directory = tiny_models.save(kind, tmp_path)
    texts = []
    for device in ("cpu", "cuda"):
        hand = Hand(load(directory, device=device, dtype="float32"))
        for row_id, sampling in PARAMETERS.items():
            hand.add(request(row_id, range(20, 50), sampling))
        hand.step(dict.fromkeys(PARAMETERS, 13))
        hand.step(dict.fromkeys(PARAMETERS, 17))
        for _ in range(10):
            hand.step(dict.fromkeys(PARAMETERS, 1))
        texts.append(hand.tokens)
    assert texts[0] == texts[1]


def test_noise_is_the_same_function():
    keys = torch.randint(-(2**31), 2**31 - 1, (50, 2), dtype=torch.int32)
    on_gpu = exponential_noise(keys.cuda(), 5000).cpu()
    torch.testing.assert_close(on_gpu, exponential_noise(keys, 5000), atol=0, rtol=1e-5)
