"""The trainer: it learns only marked tokens, and a resumed run ends with the same weights."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import batches, train
from demo.evaluate import MODEL, transformers_answers
from demo.modelling import export, new_model, num_parameters
from demo.template import render
from demo.tokenizer import load_tokenizer

ROW = (list(range(10, 30)), [False] * 10 + [True] * 10)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiny batches per shard."""

    def few(tokenizer, index):
        for shift in range(3):
            ids = [(token * 7 + index + shift) % 3000 for token in ROW[0]]
            rows = [(ids, ROW[1]), (ids[:-4], ROW[1][:-4])]
            yield batches.make_batch(rows, random.Random(index))

    monkeypatch.setattr(train, "shard_batches", few)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    return tmp_path


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_weights(small_shards, folder: Path) -> None:
    whole = train.train(folder, folder / "whole", num_shards=2)
    straight = load_file(folder / "model.safetensors")
    train.train(folder, folder / "parts", num_shards=2, minutes=1e-9)
    resumed = train.train(folder, folder / "parts", num_shards=2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, straight[name]), name
    assert resumed["steps"] == whole["steps"] == 6
    assert resumed["tokens"] == whole["tokens"]


def test_loss_falls_on_what_is_learned() -> None:
    model = new_model(0)
    batch = batches.make_batch([ROW], random.Random(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, _ = train.compute_losses(model, batch)
    for _ in range(4):
        train.compute_losses(model, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert train.compute_losses(model, batch)[0] < first - 0.5


def test_a_batch_without_questions_has_no_second_loss() -> None:
    batch = batches.make_batch([(ROW[0], [True] * 20)], random.Random(0))
    first, second = train.compute_losses(new_model(0), batch)
    assert first > 1
    assert second == 0


def test_padding_belongs_to_no_loss() -> None:
    batch = batches.make_batch([ROW, (ROW[0][:12], ROW[1][:12])], random.Random(0))
    assert batch.inputs.shape == batch.targets.shape == (2, 19)
    assert batch.targets[batch.is_answer].tolist() == [*range(20, 30), 20, 21]
    assert not (batch.is_answer & batch.is_sampled_prompt).any()
    assert not batch.is_sampled_prompt[1, 11:].any()
    assert batch.num_tokens == 32


def test_the_rate_warms_up_holds_and_falls() -> None:
    assert train.learning_rate(0, 0.0) < train.PEAK_RATE / 50
    assert train.learning_rate(1000, 5.5) == train.PEAK_RATE
    rates = [train.learning_rate(1000, shard) for shard in range(train.NUM_SHARDS + 1)]
    assert rates[17:33] == sorted(rates[17:33], reverse=True)
    assert rates[33:] == sorted(rates[33:], reverse=True)  # the closing stage restarts the schedule
    assert 0 < rates[-1] < train.PEAK_RATE / 20
    assert max(rates) == train.PEAK_RATE


def test_an_export_loads_into_transformers_with_the_same_shape(folder: Path) -> None:
    model = new_model(3)
    export(model, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert num_parameters(loaded) == num_parameters(model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=0.05)


def test_transformers_reads_our_template_and_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": "What is the capital of France? 🏳️‍🌈"}]
    text = render(messages, add_generation_prompt=True)
    theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert theirs == text
    assert tokenizer(text)["input_ids"] == load_tokenizer(MODEL).encode(text).ids
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.slow
def test_the_capital_of_france() -> None:
    messages = [{"role": "user", "content": "what is the capital of france"}]
    prompt = render(messages, add_generation_prompt=True)
    assert "Paris" in transformers_answers(MODEL)([prompt])[0]
