"""The result types of the offline ``LLM``."""

from __future__ import annotations

import msgspec

from engine.driver import Choice
from engine.memory import DeviceMemory
from engine.stats import EngineStats
from engine.text.output import TokenLogprob, prompt_entries
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason, MemoryPlan, SamplingParams


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of a prompt."""

    index: int  # 0 to n - 1
    text: str
    token_ids: tuple[int, ...]  # including the token that ended it
    logprobs: tuple[TokenLogprob, ...] | None  # one per token, if requested
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token that ended the text
    error: str | None = None  # the error message if finish_reason is "error"
    score: float | None = None  # beam search only; completions are sorted by it


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its continuations."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None  # one per token; the first has no value
    num_cached_tokens: int  # prompt tokens found in the prefix cache


class LLMStats(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's statistics and memory use."""

    engine: EngineStats
    memory: MemoryPlan  # weights and KV cache, as planned at start
    device: DeviceMemory


def make_result(
    group: list[Choice], text: str | None, sampling: SamplingParams, tokenizer: Tokenizer
) -> RequestResult:
    """Build the result of a prompt's finished choices; ``text`` is the prompt if given as text."""
    leader = group[0]
    prompt_ids = leader.request.prompt_token_ids
    prompt_logprobs = None
    if sampling.prompt_logprobs is not None:
        prompt_logprobs = tuple(prompt_entries(tokenizer, prompt_ids, leader.prompt_logprobs))
    if text is None:
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    return RequestResult(
        prompt=text,
        prompt_token_ids=prompt_ids,
        outputs=tuple(_completion(index, choice) for index, choice in enumerate(group)),
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=leader.num_cached_tokens,
    )


def _completion(index: int, choice: Choice) -> Completion:
    wanted = choice.request.sampling.logprobs is not None
    return Completion(
        index=index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(choice.logprobs) if wanted else None,
        finish_reason=choice.finish_reason or "abort",
        stop_reason=choice.stop_reason,
        error=None if choice.failure is None else choice.failure.message,
    )
