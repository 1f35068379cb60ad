"""Documents from text and JSONL files, as tokens, with a mask of the tokens to learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.distill.errors import DistillError
from tools.json_lines import numbered_lines

_CHUNK = 512  # documents encoded at once


@dataclass(frozen=True)
class Documents:
    """All documents, concatenated; document i is tokens[starts[i] : starts[i + 1]].

    tokens: [num_tokens] int32. loss_mask: [num_tokens] bool, True for tokens to be predicted.
    starts: [num_documents + 1] int64.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, loss_mask) of one document."""
        here = slice(self.starts[index], self.starts[index + 1])
        return self.tokens[here], self.loss_mask[here]

    def subset(self, indices: np.ndarray) -> Documents:
        """The documents at ``indices``, in the order given."""
        return gather([self[i] for i in indices])

    def split(self, share: float, most: int, seed: int) -> tuple[Documents, Documents]:
        """Split at random into (training, validation): `share` of the documents, `most` at most.

        Raises DistillError if that leaves nothing to train on.
        """
        if len(self) < 2:
            raise DistillError("one document cannot be split: give --validation FILE")
        order = np.random.default_rng((seed, 1)).permutation(len(self))
        held = min(most, max(1, round(share * len(self))))
        if held == len(self):
            raise DistillError(f"--validation-share: all {held} documents would be held out")
        return self.subset(np.sort(order[held:])), self.subset(np.sort(order[:held]))


def gather(rows: list[tuple[np.ndarray, np.ndarray]]) -> Documents:
    """Documents from (tokens, learn) pairs."""
    sizes = [len(tokens) for tokens, _ in rows]
    none = [(np.zeros(0, np.int32), np.zeros(0, bool))]
    return Documents(
        tokens=np.concatenate([tokens for tokens, _ in rows or none]).astype(np.int32),
        loss_mask=np.concatenate([learn for _, learn in rows or none]).astype(bool),
        starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def read_documents(paths: tuple[Path, ...], tokenizer: Any) -> Documents:
    """Read and encode files. `tokenizer` is a fast tokenizer of transformers.

    A .jsonl file has one object per line, of one of the kinds below. In any other file, blank lines
    separate documents.

        {"text": ...}                          every token is learned
        {"prompt": ..., "completion": ...}     the completion is learned
        {"messages": [...], "tools": [...]}    the assistant's turns are learned
        {"ids": [...], "learn_from": n}        token ids, learned from the nth on

    Raises DistillError, naming the file and the line.
    """
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for path in paths:
        spans = _read_jsonl(path, tokenizer) if path.suffix == ".jsonl" else _read_text(path)
        rows.extend(_encode(spans, tokenizer))
    rows = [row for row in rows if row[1][1:].any()]
    if not rows:
        raise DistillError(f"{', '.join(map(str, paths))}: no document with anything to learn")
    return gather(rows)


@dataclass(frozen=True)
class _Text:
    """A document as text; ``loss_spans`` are [start, end) in characters, to be predicted."""

    text: str
    loss_spans: list[tuple[int, int]]
    has_end_token: bool = False


def _read_text(path: Path) -> Iterator[_Text]:
    for part in read_text(path).split("\n\n"):
        if text := part.strip():
            yield _Text(text, [(0, len(text))])


def _read_jsonl(path: Path, tokenizer: Any) -> Iterator[_Text | tuple[np.ndarray, np.ndarray]]:
    for number, line in numbered_lines(read_text(path)):
        try:
            row = json.loads(line)
            yield _document(row, tokenizer)
        except DistillError as error:
            raise DistillError(f"{path}: line {number}: {error}") from None
        except ValueError as error:
            raise DistillError(f"{path}: line {number}: not JSON: {error}") from None


def read_text(path: Path) -> str:
    """Read a text file. Raises DistillError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DistillError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DistillError(f"{path}: not UTF-8 at byte {error.start}") from None


def _document(row: Any, tokenizer: Any) -> _Text | tuple[np.ndarray, np.ndarray]:
    match row:
        case {"ids": [*ids], "learn_from": int(first)}:
            if not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in ids):
                raise DistillError("'ids' are the numbers of tokens")
            return np.array(ids, np.int32), np.arange(len(ids)) >= first
        case {"messages": [*messages]}:
            return _conversation(messages, row.get("tools"), tokenizer)
        case {"prompt": str(prompt), "completion": str(completion)}:
            whole = prompt + completion
            return _Text(whole, [(len(prompt), len(whole))])
        case {"text": str(text)}:
            return _Text(text, [(0, len(text))])
    raise DistillError("neither text, prompt and completion, messages, nor ids and learn_from")


def _conversation(messages: list[Any], tools: Any, tokenizer: Any) -> _Text:
    """Render a chat; each assistant turn's addition to the preceding prompt is learned.

    A template may rewrite earlier turns (dropping their reasoning, say), so that the rendering of
    the whole chat does not start with that of its first messages. Such turns are not learned.
    """

    def render(part: list[Any], prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            part, tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    try:
        whole = render(messages, False)
        learned = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = render(messages[:i], True)
                after = whole if i + 1 == len(messages) else render(messages[: i + 1], False)
                if after.startswith(before) and whole.startswith(after):
                    learned.append((len(before), len(after)))
    except Exception as error:  # a template may raise anything
        raise DistillError(f"the chat template refuses it: {error}") from None
    return _Text(whole, learned, has_end_token=True)


def _encode(documents: Iterator, tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    chunk: list = []
    for document in documents:
        chunk.append(document)
        if len(chunk) == _CHUNK:
            yield from _encode_chunk(chunk, tokenizer)
            chunk = []
    yield from _encode_chunk(chunk, tokenizer)


def _encode_chunk(chunk: list, tokenizer: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if not chunk:
        return
    texts = [item.text if isinstance(item, _Text) else "" for item in chunk]
    offsets = tokenizer(texts, return_offsets_mapping=True, add_special_tokens=False)
    special = set(tokenizer.all_special_ids)
    for item, ids, spans in zip(
        chunk, offsets["input_ids"], offsets["offset_mapping"], strict=True
    ):
        if not isinstance(item, _Text):
            yield item
            continue
        tokens = np.array(ids, np.int32)
        ends = np.array([end for _, end in spans], np.int64)
        learn = np.zeros(len(tokens), bool)
        for first, last in item.loss_spans:  # a token belongs to the range in which it ends
            learn |= (ends > first) & (ends <= last)
        marked = item.has_end_token or (len(ids) > 0 and ids[-1] in special)
        if not marked and tokenizer.eos_token_id is not None:
            tokens = np.append(tokens, np.int32(tokenizer.eos_token_id))
            learn = np.append(learn, True)
        if tokenizer.bos_token_id is not None and tokens[:1] != tokenizer.bos_token_id:
            tokens = np.insert(tokens, 0, tokenizer.bos_token_id)
            learn = np.insert(learn, 0, False)
        yield tokens, learn
