"""Beam search in the caller's thread, for the offline ``LLM``."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from engine.beam_search import BeamParams, BeamSearch, Hypothesis, make_search, one_token_request
from engine.driver import Choice, Driver
from engine.errors import InvalidParameter
from engine.requests import fan_out
from engine.results import Completion, RequestResult
from engine.text.output import OutputDecoder
from engine.text.tokenizer import Tokenizer
from engine.types import Request, RequestOutput, SamplingParams, TokenLogprobs


def search_all(
    driver: Driver,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str | None],
    beams: BeamParams,
    params: SamplingParams,
) -> list[RequestResult]:
    """Search the continuations of all prompts in parallel, one token of every beam at a time.

    Raises:
        RequestError: a prompt or its parameters cannot be served.
        RequestFailed: a step failed.
    """
    if params.max_tokens == 0:
        raise InvalidParameter("'max_tokens' must be at least 1", param="max_tokens")
    leaders = [fan_out(f"beams-{secrets.token_hex(8)}", prompt, params)[0] for prompt in prompts]
    searches = [make_search(leader, beams, driver.core.info) for leader in leaders]
    num_cached: list[int | None] = [None] * len(leaders)
    num_steps = 0
    while any(not search.is_done for search in searches):
        groups: dict[int, list[Choice]] = {}
        try:
            for index, search in enumerate(searches):
                if not search.is_done:
                    groups[index] = _submit(driver, leaders[index], search, num_steps)
            _drive(driver, [choice for group in groups.values() for choice in group])
        finally:  # refused, interrupted or failed: abort all its requests
            driver.abort([choice for group in groups.values() for choice in group])
        num_steps += 1
        for index, group in groups.items():
            searches[index].advance([_token_logprobs(choice) for choice in group])
            if num_cached[index] is None:
                num_cached[index] = group[0].num_cached_tokens
    return [
        RequestResult(
            prompt=tokenizer.decode(prompt, skip_special_tokens=False) if text is None else text,
            prompt_token_ids=tuple(prompt),
            outputs=tuple(
                _completion(index, found, tokenizer, params)
                for index, found in enumerate(search.best)
            ),
            prompt_logprobs=None,
            num_cached_tokens=cached or 0,
        )
        for prompt, text, search, cached in zip(prompts, texts, searches, num_cached, strict=True)
    ]


def _submit(driver: Driver, leader: Request, search: BeamSearch, step: int) -> list[Choice]:
    requests = [
        one_token_request(leader, f"{step}.{index}", beam.token_ids, search.num_logprobs)
        for index, beam in enumerate(search.beams)
    ]
    return driver.submit(requests, requests[0].sampling, continuation=True)


def _drive(driver: Driver, choices: Sequence[Choice]) -> None:
    """Step until all choices have ended. Raises RequestFailed for the first that failed."""
    while any(choice.finish_reason is None for choice in choices):
        driver.step()
    for choice in choices:
        if choice.failure is not None:
            raise choice.failure.to_error()


def _token_logprobs(choice: Choice) -> TokenLogprobs:
    entry = choice.logprobs[0]
    assert entry.logprob is not None
    assert entry.rank is not None
    return TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        top_ids=tuple(top.token_id for top in entry.top),
        top_logprobs=tuple(top.logprob for top in entry.top),
    )


def _completion(
    index: int, found: Hypothesis, tokenizer: Tokenizer, params: SamplingParams
) -> Completion:
    # A stop string does not end a beam, so it must not cut the beam's text.
    shown = msgspec.structs.replace(params, stop=())
    delta = OutputDecoder(tokenizer, shown, continuation=True).push(
        RequestOutput(
            id="",
            token_ids=found.beam.token_ids,
            logprobs=found.beam.logprobs,
            finish_reason=found.finish_reason,
            stop_token_id=found.stop_token_id,
        )
    )
    return Completion(
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=None if params.logprobs is None else delta.logprobs,
        finish_reason=found.finish_reason,
        stop_reason=delta.stop_reason,
        score=found.score,
    )
