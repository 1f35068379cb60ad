"""Embeddings and scores computed in the caller's thread, for the offline ``LLM``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.driver import Choice, Driver
from engine.errors import InvalidParameter, RequestFailed
from engine.offline.inputs import Prompt, new_id
from engine.pooling import PoolingInfo, PoolingParams, relevance
from engine.progress import run_to_completion
from engine.text.tokenizer import Tokenizer
from engine.text.truncation import encode_pairs, encode_texts
from engine.types import Request, SamplingParams

_NO_TOKENS = SamplingParams(max_tokens=0)
_Job = tuple[Sequence[int], PoolingParams]


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """A prompt and its vector."""

    prompt_token_ids: tuple[int, ...]
    embedding: np.ndarray  # [size] float32


def embed_all(
    driver: Driver,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    dimensions: int | None,
    normalize: bool | None,
    limit: int | None,
    use_tqdm: bool,
) -> list[EmbeddingResult]:
    """The vector of each prompt; see ``LLM.embed``."""
    pooling = _pooling_of(driver)
    longest = _truncation_length(driver, limit)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(encode_texts(tokenizer, texts, longest))
    ids = [next(encoded) if isinstance(item, str) else list(item)[:longest] for item in prompts]
    params = PoolingParams(
        kind=pooling.kind,
        dimensions=dimensions,
        normalize=pooling.normalize if normalize is None else normalize,
    )
    vectors = _compute(driver, [(prompt, params) for prompt in ids], use_tqdm)
    return [
        EmbeddingResult(tuple(prompt), vector) for prompt, vector in zip(ids, vectors, strict=True)
    ]


def score_all(
    driver: Driver,
    tokenizer: Tokenizer,
    first: Sequence[str],
    second: Sequence[str],
    *,
    limit: int | None,
    use_tqdm: bool,
) -> list[float]:
    """The score of each pair of texts; see ``LLM.score``."""
    pooling = _pooling_of(driver)
    if len(first) == 1:
        first = list(first) * len(second)
    if len(first) != len(second):
        raise InvalidParameter(f"{len(first)} texts cannot be paired with {len(second)}")
    pairs = list(zip(first, second, strict=True))
    if not pooling.num_labels:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # without duplicates
        found = embed_all(
            driver,
            tokenizer,
            texts,
            dimensions=None,
            normalize=True,
            limit=limit,
            use_tqdm=use_tqdm,
        )
        by_text = {text: result.embedding for text, result in zip(texts, found, strict=True)}
        return [float(by_text[a] @ by_text[b]) for a, b in pairs]
    if pooling.num_labels > 1:
        raise InvalidParameter(f"this model classifies into {pooling.num_labels} labels")
    longest = _truncation_length(driver, limit)
    jobs: list[_Job] = [
        (ids, PoolingParams(kind=pooling.kind, use_score_head=True, second_start=second_from))
        for ids, second_from in encode_pairs(tokenizer, pairs, longest)
    ]
    return [relevance(float(vector[0]), pooling) for vector in _compute(driver, jobs, use_tqdm)]


def _pooling_of(driver: Driver) -> PoolingInfo:
    pooling = driver.core.info.pooling
    if pooling is None:
        raise InvalidParameter("this model makes no embeddings", param="model")
    return pooling


def _truncation_length(driver: Driver, limit: int | None) -> int | None:
    """The length that prompts are truncated to; None: they are not truncated."""
    longest = driver.core.info.max_model_len
    if limit is not None and limit != -1 and not 1 <= limit <= longest:
        problem = f"'truncate_prompt_tokens' must be -1 or between 1 and {longest}"
        raise InvalidParameter(problem, param="truncate_prompt_tokens")
    return longest if limit == -1 else limit


def _compute(driver: Driver, jobs: Sequence[_Job], use_tqdm: bool) -> list[np.ndarray]:
    """Compute the vector of each job, all in one batch."""
    groups: list[list[Choice]] = []
    try:
        for token_ids, params in jobs:
            request = Request(
                id=new_id(),
                prompt_token_ids=tuple(token_ids),
                pooling=params,
                arrival_s=time.monotonic(),
            )
            groups.append(driver.submit([request], _NO_TOKENS, continuation=False))
        run_to_completion(driver, groups, use_tqdm)
    finally:  # refused, interrupted or failed: abort all requests of this call
        driver.abort([choice for group in groups for choice in group])
    return [_vector(choice) for (choice,) in groups]


def _vector(choice: Choice) -> np.ndarray:
    if choice.failure is not None:
        raise choice.failure.to_error()
    if choice.embedding is None:
        raise RequestFailed("the engine returned no vector")
    return np.frombuffer(choice.embedding, "<f4").astype(np.float32, copy=False)
