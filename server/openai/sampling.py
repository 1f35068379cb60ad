"""Conversion of the API's fields to ``SamplingParams``, validated against the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.text.bad_words import with_bad_token_ids
from engine.types import MAX_LOGPROBS, EngineInfo, SamplingParams
from server.errors import ApiError, bad_field
from server.openai.inputs import ChatRequest, CompletionRequest, GenerationRequest
from server.openai.structured import requested_grammar
from server.state import Model

DEFAULT_COMPLETION_TOKENS = 16
_INLINE_BAD_CHARS = 1024  # longer bad words are encoded on a thread; each is encoded three times

# Fields with the same meaning on both sides.
_SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
    "n",
)


def chat_sampling(body: ChatRequest, prompt_len: int, model: Model) -> SamplingParams:
    """The sampling of a chat request; without a limit, the output may fill the context.

    Raises:
        ApiError: 400, a field is invalid for the model, or the context is too short.
        InvalidParameter: a value is out of range.
    """
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = body.output_limit
    _check_context(prompt_len, limit, model.info, prompt_param="messages", limit_param=field)
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise bad_field("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}")
    return _build_params(body, model, max_tokens=limit, logprobs=top if body.logprobs else None)


def completion_sampling(
    body: CompletionRequest, prompt_len: int, model: Model, *, stop_token_ids: Sequence[int] = ()
) -> SamplingParams:
    """The sampling of one prompt of a completion request; the limit is 16 tokens by default.

    With ``echo``, ``logprobs`` includes the prompt's tokens. With ``best_of``, that many
    continuations are sampled, and their logprobs are computed to choose the best.

    Args:
        body: the request.
        prompt_len: tokens of the prompt.
        model: serves the request.
        stop_token_ids: stop tokens in addition to the request's.

    Raises:
        ApiError: 400, a field is invalid for the model, or the context is too short.
        InvalidParameter: a value is out of range.
    """
    limit = body.max_tokens
    _check_context(prompt_len, limit, model.info, prompt_param="prompt", limit_param="max_tokens")
    if limit is None:
        limit = min(DEFAULT_COMPLETION_TOKENS, model.info.max_model_len - prompt_len)
    given: dict[str, Any] = {"max_tokens": limit, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.logprobs
    if body.uses_best_of:
        given |= {"n": body.best_of, "logprobs": body.logprobs or 0}
    return _build_params(body, model, stop_token_ids, **given)


async def encode_bad_words(
    samplings: Sequence[SamplingParams], model: Model
) -> list[SamplingParams]:
    """The sampling of one request's prompts, which have the same bad words, with their token ids.

    Raises:
        InvalidParameter: a word cannot be encoded.
    """
    first = samplings[0]
    if not first.bad_words:
        return list(samplings)
    if sum(map(len, first.bad_words)) <= _INLINE_BAD_CHARS:
        first = with_bad_token_ids(first, model.tokenizer)
    else:
        first = await asyncio.to_thread(with_bad_token_ids, first, model.tokenizer)
    bad_ids = first.bad_token_ids
    return [msgspec.structs.replace(each, bad_token_ids=bad_ids) for each in samplings]


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError (400) unless every id is in the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise bad_field(param, f"must hold token ids between 0 and {vocab_size - 1}")


def _build_params(
    body: GenerationRequest, model: Model, also_stop: Sequence[int] = (), /, **given: Any
) -> SamplingParams:
    vocab_size = model.info.vocab_size
    asked = {name: getattr(body, name) for name in _SHARED} | given
    values = model.sampling_defaults | {k: v for k, v in asked.items() if v is not None}
    for field in ("logprobs", "prompt_logprobs"):
        if not 0 <= values.get(field, 0) <= MAX_LOGPROBS:
            raise bad_field(field, f"must be between 0 and {MAX_LOGPROBS}")
    if (beams := body.beams) is not None:
        values["n"] = beams.width
    stop_ids = body.stop_token_ids or []
    check_token_ids(stop_ids, vocab_size, "stop_token_ids")
    allowed_ids = body.allowed_token_ids
    check_token_ids(allowed_ids or [], vocab_size, "allowed_token_ids")
    held = requested_grammar(body)
    return SamplingParams(
        grammar=None if held is None else held.grammar,
        allowed_token_ids=None if allowed_ids is None else tuple(allowed_ids),
        bad_words=tuple(body.bad_words or ()),
        stop=tuple(body.stop),
        stop_token_ids=(*stop_ids, *also_stop),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        **values,
    )


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() and len(key) < 12 for key in biases):
        raise bad_field("logit_bias", "must have token ids as its keys")
    by_id = {int(key): value for key, value in biases.items()}
    check_token_ids(list(by_id), vocab_size, "logit_bias")
    return by_id


def _check_context(
    prompt_len: int, limit: int | None, info: EngineInfo, *, prompt_param: str, limit_param: str
) -> None:
    """Raise ApiError (400) unless the prompt and the requested output fit the context."""
    if limit is not None and not 0 <= limit < 2**31:
        raise bad_field(limit_param, "must be a positive integer below 2^31")
    context = info.max_model_len
    least = 1 if limit is None else min(limit, 1)
    if prompt_len + least > context:
        param, wanted = prompt_param, f"the prompt has {prompt_len}"
    elif limit is not None and prompt_len + limit > context:
        param = limit_param
        wanted = f"the prompt has {prompt_len} and '{limit_param}' asks for {limit}"
    else:
        return
    # Clients that shorten their prompts match this wording, which is OpenAI's.
    message = f"This model's maximum context length is {context} tokens, and {wanted}."
    raise ApiError(400, message, param=param, code="context_length_exceeded")
