"""Logprobs in the API's two shapes: chat's nested lists, and the completions' parallel lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.text.output import TokenLogprob as Entry
from engine.text.output import TopLogprob as Top
from engine.text.tokenizer import Tokenizer
from engine.types import TokenLogprobs
from server.openai.outputs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)


def chat_logprobs(entries: Sequence[Entry], *, as_ids: bool = False) -> ChatLogprobs:
    """``choices[].logprobs`` of a chat response, or of a chunk of one.

    The token or stop string that ended the output is not part of the content, and is left out. With
    ``as_ids`` a token is named ``token_id:N``; ``bytes`` are still those of its text.
    """
    name = _id_of if as_ids else _text_of
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=name(entry),
                logprob=entry.logprob,
                bytes=list(entry.data),
                top_logprobs=[
                    TopLogprob(token=name(top), logprob=top.logprob, bytes=list(top.data))
                    for top in entry.top
                ],
            )
            for entry in entries
            if entry.visible and entry.logprob is not None
        ]
    )


def completion_logprobs(
    entries: Sequence[Entry], offset: int = 0, *, as_ids: bool = False
) -> CompletionLogprobs:
    """``choices[].logprobs`` of a completion.

    Every token is included, also one that ended the text, so that the lists are as long as the
    token counts in ``usage``: evaluation harnesses slice them by token. The token itself is always
    in its own dict, with the same float as in ``token_logprobs``.

    Args:
        entries: tokens of the prompt (if echoed), then of the output.
        offset: added to text offsets.
        as_ids: name a token ``token_id:N`` instead of by its text.
    """
    name = _id_of if as_ids else _text_of
    return CompletionLogprobs(
        tokens=[name(entry) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_logprob_by_name(entry, name) for entry in entries],
        text_offset=[entry.text_offset + offset for entry in entries],
    )


def prompt_logprobs(
    prompt: Sequence[int], reported: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> PromptLogprobs:
    """The ``prompt_logprobs`` extra: a dict by token id for each position, null for the first."""
    positions: PromptLogprobs = [None] if prompt else []
    for position in reported:
        by_id = {
            str(id): PromptLogprob(logprob, rank, tokenizer.token_text(id))
            for rank, (id, logprob) in enumerate(
                zip(position.top_ids, position.top_logprobs, strict=True), start=1
            )
        }
        own = PromptLogprob(
            position.logprob, position.rank, tokenizer.token_text(position.token_id)
        )
        by_id[str(position.token_id)] = own
        positions.append(by_id)
    return positions


TokenNamer = Callable[[Entry | Top], str]


def _text_of(token: Entry | Top) -> str:
    return token.token


def _id_of(token: Entry | Top) -> str:
    return f"token_id:{token.token_id}"


def _logprob_by_name(entry: Entry, name: TokenNamer) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    by_name = {name(entry): entry.logprob}
    for top in entry.top:
        # Two tokens may decode to the same text: the likelier one is kept.
        by_name[name(top)] = max(top.logprob, by_name.get(name(top), top.logprob))
    return by_name
