"""Embeddings and scores computed in the caller's thread, for the offline ``LLM``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.argument_types import check_type
from engine.driver import Choice, Driver
from engine.errors import InvalidParameter, RequestFailed
from engine.offline.inputs import Prompt, as_prompts, new_id
from engine.pooling import PoolingParams, relevance
from engine.progress import run_to_completion
from engine.text.pooled_texts import PooledTexts
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from engine.types import Request, SamplingParams

_NO_TOKENS = SamplingParams(max_tokens=0)
_Job = tuple[Sequence[int], PoolingParams]


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """A prompt and its vector."""

    prompt_token_ids: tuple[int, ...]
    embedding: np.ndarray  # [size] float32


class OfflineVectors:
    """Methods of ``LLM`` that compute vectors and scores."""

    _driver: Driver
    _tokenizer: Tokenizer
    _template: ChatTemplate

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingResult]:
        """A vector for each prompt, in order; the arguments are those of POST /v1/embeddings.

        Raises:
            RequestError: a prompt or an argument cannot be served.
            RequestFailed: a prompt failed in the engine.
        """
        check_type("prompt_name", prompt_name, str | None)
        read = self._pooled_texts()
        pooling, longest = read.pooling, _truncation_length(self._driver, truncate_prompt_tokens)
        before = pooling.prompt_of(prompt_name)
        several = as_prompts(prompts)
        texts = [prompt for prompt in several if isinstance(prompt, str)]
        if prompt_name and len(texts) < len(several):
            raise InvalidParameter("a prompt cannot stand before token ids", param="prompt_name")
        encoded = iter(read.encode(texts, longest, prompt=before))
        ids = [next(encoded) if isinstance(item, str) else list(item)[:longest] for item in several]
        params = PoolingParams(
            kind=pooling.kind,
            dimensions=dimensions,
            normalize=pooling.normalize if normalize is None else normalize,
        )
        vectors = _compute(self._driver, [(prompt, params) for prompt in ids], use_tqdm)
        return [
            EmbeddingResult(tuple(prompt), vector)
            for prompt, vector in zip(ids, vectors, strict=True)
        ]

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[float]:
        """How well texts match: one against several, or two lists pairwise.

        Uses the model's scoring head if it has one, else the cosine of embeddings. Raises as
        ``embed`` does.
        """
        read = self._pooled_texts()
        pooling, before = read.pooling, read.pooling.instruction_of(instruction)
        pairs = _pair([first] if isinstance(first, str) else list(first), second)
        if not pooling.num_labels:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each once
            found = self.embed(
                texts,
                normalize=True,
                truncate_prompt_tokens=truncate_prompt_tokens,
                use_tqdm=use_tqdm,
            )
            by_text = {text: result.embedding for text, result in zip(texts, found, strict=True)}
            return [float(by_text[a] @ by_text[b]) for a, b in pairs]
        if pooling.num_labels > 1:
            raise InvalidParameter(f"this model classifies into {pooling.num_labels} labels")
        longest = _truncation_length(self._driver, truncate_prompt_tokens)
        jobs: list[_Job] = [
            (ids, pooling.score_params(second_from))
            for ids, second_from in read.encode_pairs(pairs, longest, prompt=before)
        ]
        vectors = _compute(self._driver, jobs, use_tqdm)
        return [relevance(float(vector[0]), pooling) for vector in vectors]

    def _pooled_texts(self) -> PooledTexts:
        """What encodes texts. Raises InvalidParameter if the model makes no vectors."""
        pooling = self._driver.core.info.pooling
        if pooling is None:
            raise InvalidParameter("this model makes no embeddings", param="model")
        return PooledTexts(self._tokenizer, self._template, pooling)


def _pair(first: list[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """One text with each of several, or two lists pairwise."""
    others = [second] if isinstance(second, str) else list(second)
    if len(first) == 1:
        first = first * len(others)
    if len(first) != len(others):
        raise InvalidParameter(f"{len(first)} texts cannot be paired with {len(others)}")
    return list(zip(first, others, strict=True))


def _truncation_length(driver: Driver, limit: int | None) -> int | None:
    """The length that prompts are truncated to; None: they are not truncated."""
    check_type("truncate_prompt_tokens", limit, int | None)
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
