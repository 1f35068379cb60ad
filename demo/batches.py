"""Token batches from the corpus, padded to a shared length, with the assistant's tokens marked."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from demo import corpus
from demo.tokenizer import END_OF_TEXT, IM_END, MAX_CONTEXT

BATCH_TOKENS = 2048
# Share of the tokens outside answers that the second, lighter loss uses.
PROMPT_LOSS_SHARE = 0.25


@dataclass(frozen=True)
class Batch:
    """inputs and targets: [rows, length] ids; answer and asked: [rows, length] bool.

    `answer` marks the targets inside answers; `asked` marks a random quarter of the others.

    Padding is on the right, so with causal attention no real token sees it and no mask is needed.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    is_answer: torch.Tensor
    is_sampled_prompt: torch.Tensor
    num_tokens: int


def shard_batches(tokenizer: Tokenizer, index: int) -> Iterator[Batch]:
    """The batches of one shard: rows of similar length together, batches in seeded random order."""
    rows = encode_shard(tokenizer, index)
    rng = random.Random(f"batches {corpus.SEED} {index}")
    rows.sort(key=lambda row: (len(row[0]), rng.random()))
    groups: list[list] = [[]]
    for row in rows:
        if groups[-1] and (len(groups[-1]) + 1) * len(row[0]) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    for group in groups:
        yield make_batch(group, rng)


def encode_shard(tokenizer: Tokenizer, index: int) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask of the tokens to learn) for each conversation, truncated at the context length."""
    conversations = corpus.shard(index)
    encoded = tokenizer.encode_batch([corpus.as_text(c) for c in conversations])
    opening = tokenizer.encode("<|im_start|>assistant\n").ids
    rows = []
    for conversation, encoding in zip(conversations, encoded, strict=True):
        ids = encoding.ids[:MAX_CONTEXT]
        learn = [True] * len(ids) if "text" in conversation else answer_mask(ids, opening)
        rows.append((ids, learn))
    return rows


def answer_mask(ids: list[int], opening: list[int]) -> list[bool]:
    """True for the tokens of assistant messages, including their end token."""
    learn = [False] * len(ids)
    inside = False
    for i, token in enumerate(ids):
        if inside:
            learn[i] = True
            inside = token != IM_END
        elif ids[i + 1 - len(opening) : i + 1] == opening:
            inside = True
    return learn


def make_batch(group: list[tuple[list[int], list[bool]]], rng: random.Random) -> Batch:
    """Pad rows of (ids, learn) to one length and mark the tokens of the two losses."""
    length = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), length), END_OF_TEXT)
    learn = torch.zeros((len(group), length), dtype=torch.bool)
    asked = torch.zeros((len(group), length), dtype=torch.bool)
    for r, (row, mask) in enumerate(group):
        ids[r, : len(row)] = torch.tensor(row)
        learn[r, : len(row)] = torch.tensor(mask)
        asked[r, : len(row)] = torch.tensor(
            [not m and rng.random() < PROMPT_LOSS_SHARE for m in mask], dtype=torch.bool
        )
    num_tokens = sum(len(row) for row, _ in group)
    return Batch(ids[:, :-1], ids[:, 1:], learn[:, 1:], asked[:, 1:], num_tokens)
