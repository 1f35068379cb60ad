"""A model shared out to ranks says what Hugging Face's says, for every family."""

from __future__ import annotations

import pytest
import torch

from engine.parallel import leader
from engine.types import SamplingParams
from tests import tiny_models
from tests.engine.handmade import Hand, load, request
from tests.engine.parallel.thread_ranks import ThreadRank

NUM_TOKENS = 50
CHUNKS = (13, 1, 20, 16)  # blocks are of 4: chunks begin and end within them
CHANGES = {
    "smollm": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "falcon_one_norm": {"num_kv_heads": 2},
}


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(leader, "Child", ThreadRank)


def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 160, (NUM_TOKENS,), generator=generator).tolist()


def shared_logits(directory, size, **changes) -> torch.Tensor:
    """[tokens, vocab] of a model on ``size`` ranks, in chunks."""
    runner = load(directory, tensor_parallel_size=size, **changes)
    try:
        model, hidden = runner._model, []
        forward = model.forward
        model.forward = lambda *arguments: hidden.append(forward(*arguments)) or hidden[-1]
        hand = Hand(runner)
        hand.add(request("a", prompt(), SamplingParams(prompt_logprobs=0)))
        for count in CHUNKS:
            hand.step({"a": count})
        with torch.inference_mode():
            return model.logits(torch.cat(hidden))
    finally:
        runner._team.close()


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_two_ranks_say_what_hugging_face_says(tmp_path, kind):
    model = tiny_models.build(kind, **CHANGES.get(kind, {}))
    with torch.no_grad():
        expected = model(torch.tensor([prompt()])).logits[0]
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(shared_logits(tmp_path, 2), expected, atol=1e-4, rtol=0)
