"""Token ids of completions' prompts, and truncation of long ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.types import EngineInfo
from server.errors import bad_field
from server.openai.endpoint import check_length, encode_texts
from server.openai.extra_fields import ExtraFields
from server.openai.inputs import CompletionRequest, Prompt
from server.openai.sampling import check_token_ids
from server.state import Model
from server.text.infill import Infill


async def encode_prompts(body: CompletionRequest, model: Model) -> list[list[int]]:
    """Token ids of each prompt of a completion request, before truncation.

    Raises:
        ApiError: 400, an id outside the vocabulary, or a suffix and a model without infill.
        ContextLengthExceeded: a text is longer than any context.
    """
    prompts: list[Prompt] = body.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for ids in prompts:
        if not isinstance(ids, str):
            check_token_ids(ids, model.info.vocab_size, "prompt")
    if texts:
        check_length(max(map(len, texts)), model, "prompt")
    if body.suffix:
        return await _encode_infill(prompts, body.suffix, model)
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    wanted = body.add_special_tokens
    add_special = True if wanted is None else wanted
    return await encode_texts(model.tokenizer, texts, add_special_tokens=add_special)


def infill_of(model: Model) -> Infill:
    """The model's fill-in-the-middle format. Raises ApiError (400) if it has none."""
    infill = Infill.of(model.tokenizer)
    if infill is None:
        problem = "cannot be served: this model's vocabulary has no tokens for filling in a middle"
        raise bad_field("suffix", problem)
    return infill


async def _encode_infill(prompts: list[Prompt], suffix: str, model: Model) -> list[list[int]]:
    infill = infill_of(model)
    check_length(len(suffix), model, "suffix")
    return await asyncio.to_thread(lambda: [infill.encode(prompt, suffix) for prompt in prompts])


def truncate_prompt(
    ids: Sequence[int], fields: ExtraFields, max_tokens: int, info: EngineInfo
) -> list[int]:
    """``ids``, truncated as ``truncate_prompt_tokens`` asks.

    Args:
        ids: the whole prompt.
        fields: the request's.
        max_tokens: of the output; -1 leaves room for these.
        info: of the model.

    Raises:
        ApiError: 400, more tokens are to be kept than the context has.
    """
    kept = fields.truncate_prompt_tokens
    if kept is None:
        return list(ids)
    context = info.max_model_len
    if kept > context:
        raise bad_field("truncate_prompt_tokens", f"exceeds the context of {context} tokens")
    if kept == -1:
        kept = max(1, context - max(1, max_tokens))
    return list(ids[:kept] if fields.truncation_side == "right" else ids[-kept:])
