"""The student's training data: masks of learned tokens, packed rows, a resumable stream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.evaluate import MODEL
from tools.distill import generation, models
from tools.distill.acceptance import read_prompts
from tools.distill.documents import Documents, gather, read_documents
from tools.distill.errors import DistillError
from tools.distill.packing import Packer, collate, validation_batches
from tools.distill.settings import Generation, Settings


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer(str(MODEL))


def documents_of(lengths: list[int]) -> Documents:
    """Documents whose tokens encode their origin: 1000 * document + position."""
    rows = [(1000 * i + np.arange(n), np.ones(n, bool)) for i, n in enumerate(lengths)]
    return gather(rows)


def learned_text(path: Path, tokenizer) -> list[str]:
    documents = read_documents((path,), tokenizer)
    parts = [documents[i] for i in range(len(documents))]
    return [tokenizer.decode(tokens[learn].tolist()) for tokens, learn in parts]


def test_only_answers_of_a_chat_are_learned(tmp_path, tokenizer):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "Rome."},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n\n", "utf-8")
    (said,) = learned_text(path, tokenizer)
    assert said.replace("\n", "") == "Paris.<|im_end|>Rome.<|im_end|>"


def test_completions_texts_and_token_ids(tmp_path, tokenizer):
    path = tmp_path / "mixed.jsonl"
    rows = [
        {"prompt": "One and one is", "completion": " two."},
        {"text": "All of this."},
        {"ids": [5, 6, 7, 8], "learn_from": 2},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    said = learned_text(path, tokenizer)
    assert said[:2] == [" two.<|im_end|>", "All of this.<|im_end|>"]
    assert said[2] == tokenizer.decode([7, 8])
    plain = tmp_path / "story.txt"
    plain.write_text("A first part.\n\nA second part.\n", "utf-8")
    assert learned_text(plain, tokenizer) == ["A first part.<|im_end|>", "A second part.<|im_end|>"]


def test_a_line_ends_where_json_lines_end(tmp_path, tokenizer):
    """Not at what else Python calls a line's end: JSON strings may hold it as it is."""
    said = ["A\u2028paragraph.", "Two\x85parts.", "And\u2029more."]
    path = tmp_path / "odd.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in said]
    path.write_bytes("".join(lines).encode())
    assert learned_text(path, tokenizer) == [text + "<|im_end|>" for text in said]
    asked = tmp_path / "asked.jsonl"
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) + "\n\n" for text in said]
    asked.write_text("".join(rows), "utf-8")
    assert [tokenizer.decode(ids) for ids in read_prompts(asked, tokenizer)] == said


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ('{"body": 1}', "line 2: neither text"),
        ('{"ids": [5, -1], "learn_from": 0}', "line 2: 'ids' are the numbers"),
        ('{"ids": [5, 4294967296], "learn_from": 0}', "line 2: 'ids' are the numbers"),
        ('{"messages": [{"role": "nobody", "content": ""}]}', "line 2: the chat template refuses"),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer, line, problem):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine, this one"}\n' + line + "\n", "utf-8")
    with pytest.raises(DistillError, match=problem):
        read_documents((path,), tokenizer)


def test_the_teachers_text_is_written_once_and_not_mixed_with_other_text(
    tmp_path, tokenizer, monkeypatch
):
    """Ten documents in batches of four; what they say would end a line for ``str.splitlines``."""
    written: list[int] = []

    def write(asked, teacher, tokenizer, prompts):
        written.append(len(prompts))
        return [tokenizer("a\u2028b")["input_ids"] for _ in prompts]

    monkeypatch.setattr(generation, "continue_prompts", write)
    asked = Generation(num_documents=10, batch_rows=4)
    run = Settings(teacher="one", out=tmp_path, generation=asked)
    path = generation.generate(run, None, tokenizer, None)
    whole = path.read_text("utf-8")
    assert generation.generate(run, None, tokenizer, None) == path
    assert written == [4, 4, 2]
    rows = whole.split("\n")[:-1]
    assert len(rows) == 10
    path.write_text("\n".join(rows[:5]) + '\n{"ids": [1', "utf-8")
    warmer = replace(run, generation=replace(asked, temperature=1.5))
    with pytest.raises(DistillError, match="written with another temperature; --overwrite"):
        generation.generate(warmer, None, tokenizer, None)
    assert generation.generate(run, None, tokenizer, None, overwrite=True).read_text() == whole
    assert written == [4, 4, 2, 4, 2]  # the whole batch that was there is kept
    generation.generate(warmer, None, tokenizer, None, overwrite=True)
    assert written == [4, 4, 2, 4, 2, 4, 4, 2]


def test_nothing_to_learn_is_an_error(tmp_path, tokenizer):
    path = tmp_path / "empty.txt"
    path.write_text("\n\n", "utf-8")
    with pytest.raises(DistillError, match=r"empty\.txt: no document"):
        read_documents((path,), tokenizer)
    with pytest.raises(DistillError, match="No such file"):
        read_documents((tmp_path / "absent.txt",), tokenizer)
    with pytest.raises(DistillError, match="all 3 documents would be held out"):
        documents_of([2, 3, 4]).split(0.99, 256, 0)


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=30),
    st.integers(8, 24),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_once_an_epoch(lengths, row_tokens, seed):
    documents = documents_of(lengths)
    packer = Packer(documents, seed)
    seen: list[int] = []
    while len(seen) < 2 * sum(length - 1 for length in lengths):
        batch = packer.batch(2, row_tokens)
        rows = zip(batch.inputs[batch.loss_mask].tolist(), batch.targets.tolist(), strict=True)
        for token, following in rows:
            assert following == token + 1  # within one document
            seen.append(following)
        starts = batch.positions == 0
        assert starts[:, 0].all()
    everything = sorted(1000 * i + k for i, n in enumerate(lengths) for k in range(1, n))
    counts = {token: seen.count(token) for token in everything}
    # A row may hold the end of one epoch and the start of the next, and some pieces wait for room.
    assert packer.epoch < 3 or min(counts.values()) >= 1
    assert max(counts.values()) <= packer.epoch + 1


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_a_stream_goes_on_from_where_it_was(lengths, before):
    documents = documents_of(lengths)
    first = Packer(documents, 3)
    for _ in range(before):
        first.batch(1, 16)
    second = Packer(documents, 3)
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(10):
        assert torch.equal(first.batch(2, 16).inputs, second.batch(2, 16).inputs)


def test_no_row_teaches_nothing():
    """Of a long question only the piece with its answer is used, wherever it is cut."""
    long = (np.arange(100), np.arange(100) >= 95)
    documents = gather([long, (np.arange(8), np.arange(8) >= 4)])
    packer = Packer(documents, 0)
    for _ in range(20):
        batch = packer.batch(1, 16)
        assert len(batch.targets) > 0
    assert len(validation_batches(documents, 1, 16)) == 1
    with pytest.raises(DistillError, match="within 16 tokens"):
        validation_batches(gather([long]), 1, 16)


def test_rows_hold_each_document_once_where_they_are_to_be_judged():
    batches = validation_batches(documents_of([5, 9, 3, 30]), rows=2, row_tokens=10)
    targets = sorted(torch.cat([batch.targets for batch in batches]).tolist())
    assert targets == sorted(1000 * i + k for i, n in enumerate([5, 9, 3, 10]) for k in range(1, n))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2_window", "gpt2", "gpt_neox"])
def test_documents_of_a_row_do_not_see_each_other(tmp_path, kind):
    """A document's logits in a packed row equal those that it has alone."""
    from tests import tiny_models

    folder = tiny_models.save(kind, tmp_path)
    model = models.load_model(
        folder, torch.float32, torch.device("cpu"), eager_attention=False
    ).eval()
    assert models.isolates_documents(model)
    tokens = np.random.default_rng(0).integers(3, 160, 34).astype(np.int32)
    documents = Documents(tokens, np.ones(34, bool), np.array([0, 20, 34]))
    batch = collate(documents, [[(0, 0, 20), (1, 0, 14)]], 40)
    with torch.no_grad():
        packed = models.run(model, batch.inputs, batch.positions, batch.loss_mask).logits
        for i, place in ((0, slice(0, 19)), (1, slice(19, 32))):
            ids = torch.from_numpy(documents[i][0].astype(np.int64))[None]
            alone = model(ids).logits[0, :-1]
            torch.testing.assert_close(packed[place], alone, rtol=1e-4, atol=1e-4)


def test_attention_that_crosses_documents_is_seen(tmp_path, monkeypatch):
    from tests import tiny_models

    folder = tiny_models.save("llama", tmp_path)
    model = models.load_model(
        folder, torch.float32, torch.device("cpu"), eager_attention=False
    ).eval()
    whole = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: whole(**given | {"position_ids": None}))
    assert not models.isolates_documents(model)
