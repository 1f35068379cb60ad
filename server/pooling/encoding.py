"""Encoding of texts for the pooling endpoints, with truncation on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.pooling import PoolingInfo
from engine.text.pooled_texts import PooledTexts
from engine.text.truncation import EncodedPair
from server.errors import ApiError, bad_field
from server.openai.endpoint import INLINE_CHARS, check_length
from server.openai.inputs import Prompt
from server.openai.sampling import check_token_ids
from server.state import Model

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def pooling_of(model: Model) -> PoolingInfo:
    """How the model makes vectors. Raises ApiError (400) if it makes none."""
    if model.info.pooling is None:
        raise ApiError(400, "This model makes no embeddings.", param="model")
    return model.info.pooling


def truncation_length(wanted: int | None, model: Model) -> int | None:
    """The tokens that prompts are truncated to; None disables truncation.

    Raises:
        ApiError: 400, the length exceeds the model's maximum.
    """
    longest = model.info.max_model_len
    if wanted is not None and wanted > longest:
        problem = f"must be at most {longest}, the longest input of this model"
        raise bad_field("truncate_prompt_tokens", problem)
    return longest if wanted == -1 else wanted


def check_count(name: str, items: Sequence[object], limit: int) -> None:
    """Reject more inputs than a request may have."""
    if len(items) > limit:
        raise bad_field(name, f"holds {len(items)} items; the limit is {limit}")


def find_prompt(pooling: PoolingInfo, name: str | None, field: str = "prompt_name") -> str:
    """Return the text of the prompt that ``field`` names; see ``PoolingInfo.prompt_of``.

    Raises:
        ApiError: 400, the model has no such prompt.
    """
    try:
        return pooling.prompt_of(name)
    except InvalidParameter as error:
        raise ApiError(400, error.message, param=field) from None


async def encode_inputs(
    inputs: Sequence[Prompt],
    model: Model,
    limit: int | None,
    *,
    add_special_tokens: bool = True,
    prompt: str = "",
    param: str = "input",
) -> list[list[int]]:
    """Token ids of each input, text or token ids; errors about them name ``param``.

    ``prompt`` stands before each text.

    Raises:
        ApiError: 400, a token id is not in the vocabulary.
        ContextLengthExceeded: an input is longer than the model's context.
        InvalidParameter: a text cannot be encoded.
    """
    texts = [text for text in inputs if isinstance(text, str)]
    if not texts:
        ids = [ids for ids in inputs if not isinstance(ids, str)]
        for one in ids:
            check_token_ids(one, model.info.vocab_size, param)
        encoded = [one[:limit] for one in ids]
    else:
        if limit is None:
            check_length(max(map(len, texts)), model, param)

        read = PooledTexts(model.tokenizer, model.template, pooling_of(model))
        encode = partial(
            read.encode, limit=limit, prompt=prompt, add_special_tokens=add_special_tokens
        )
        encoded = await _run(encode, texts, model, sum(map(len, texts)))
    _check_lengths(encoded, model, param)
    return encoded


async def encode_text_pairs(
    pairs: Sequence[tuple[str, str]], model: Model, limit: int | None, *, prompt: str, param: str
) -> list[EncodedPair]:
    """Encode each pair of texts as one prompt, behind ``prompt``.

    Raises as ``encode_inputs``, naming ``param``.
    """
    chars = [len(first) + len(second) for first, second in pairs]
    if limit is None:
        check_length(max(chars), model, param)

    read = PooledTexts(model.tokenizer, model.template, pooling_of(model))
    if read.pooling.messages is not None:  # its first text is never cut
        check_length(max(len(first) for first, _ in pairs), model, param)
    encode = partial(read.encode_pairs, limit=limit, prompt=prompt)
    encoded = await _run(encode, pairs, model, sum(chars))
    _check_lengths([pair.token_ids for pair in encoded], model, param)
    return encoded


async def _run(
    encode: Callable[[Sequence[_Item]], list[_Result]],
    items: Sequence[_Item],
    model: Model,
    num_chars: int,
) -> list[_Result]:
    """Encode texts of so many characters: on a thread if that takes long, or renders them."""
    if pooling_of(model).messages is None:
        work = partial(encode, items)
        return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
    # One by one: the thread renders for other requests, too, and they do not wait for all.
    found: list[_Result] = []
    for item in items:
        found += await model.template.in_thread(partial(encode, [item]))
    return found


def _check_lengths(prompts: Sequence[Sequence[int]], model: Model, param: str) -> None:
    longest = model.info.max_model_len
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise bad_field(param, f"has an input without a token (number {index})")
        if len(prompt) > longest:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens, and input {index} has "
                f"{len(prompt)}. Shorten it, or send 'truncate_prompt_tokens': -1.",
                param=param,
            )
