"""Sampling parameters of all rows as columns, so that a step reads them with one index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.sampling.seeds import request_seed
from engine.types import Request


@dataclass(frozen=True, slots=True)
class SparseRow:
    """What concerns single tokens of one row: ids below the vocabulary's size."""

    bias_ids: np.ndarray  # [b] int64
    bias_values: np.ndarray  # [b] float32
    end_ids: np.ndarray  # [e] int64: tokens that may not come before min_tokens


class SamplingColumns:
    """One slot for each row the runner knows; ``set`` writes a slot, a step reads many.

    Args:
        capacity: number of slots; grown by ``grow``.
        eos_token_ids: what ends a text, banned like stop ids until ``min_tokens``.
    """

    _FIELDS = (
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("seed", np.int64),
        ("num_logprobs", np.int64),  # -1: none asked for
        ("min_position", np.int64),  # the first position where the text may end
        ("is_truncated", np.bool_),  # top_k, top_p or min_p
        ("is_penalised", np.bool_),
        ("is_biased", np.bool_),
    )

    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    top_k: np.ndarray
    presence_penalty: np.ndarray
    frequency_penalty: np.ndarray
    repetition_penalty: np.ndarray
    seed: np.ndarray
    num_logprobs: np.ndarray
    min_position: np.ndarray
    is_truncated: np.ndarray
    is_penalised: np.ndarray
    is_biased: np.ndarray

    def __init__(self, capacity: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self.sparse: dict[int, SparseRow] = {}  # slots with a bias or with min_tokens
        for name, dtype in self._FIELDS:
            setattr(self, name, np.zeros(capacity, dtype))

    def grow(self, capacity: int) -> None:
        """Make room for more slots; what is there stays."""
        for name, dtype in self._FIELDS:
            grown = np.zeros(capacity, dtype)
            old = getattr(self, name)
            grown[: old.size] = old
            setattr(self, name, grown)

    def set(self, slot: int, request: Request) -> None:
        """Write a request's parameters."""
        sampling = request.sampling
        top_k = sampling.top_k if sampling.top_k > 0 else 2**31
        # Below this, dividing logits overflows; the likeliest token is certain long before.
        self.temperature[slot] = max(sampling.temperature, 1e-4) if sampling.temperature else 0.0
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.top_k[slot] = top_k
        self.presence_penalty[slot] = sampling.presence_penalty
        self.frequency_penalty[slot] = sampling.frequency_penalty
        self.repetition_penalty[slot] = sampling.repetition_penalty
        self.seed[slot] = request_seed(request)
        self.num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        prompt = len(request.prompt_token_ids)
        self.min_position[slot] = prompt + sampling.min_tokens if sampling.min_tokens else 0
        self.is_truncated[slot] = top_k < 2**31 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self.is_penalised[slot] = (
            sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
            or sampling.repetition_penalty != 1.0
        )
        self.is_biased[slot] = bool(sampling.logit_bias)
        self._set_sparse(slot, request)

    def clear(self, slot: int) -> None:
        """Forget a slot's sparse part; its columns are overwritten by the next ``set``."""
        self.sparse.pop(slot, None)

    def _set_sparse(self, slot: int, request: Request) -> None:
        sampling = request.sampling
        self.sparse.pop(slot, None)
        if not (sampling.logit_bias or sampling.min_tokens):
            return
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(self._eos)
        self.sparse[slot] = SparseRow(
            bias_ids=np.fromiter(sampling.logit_bias.keys(), np.int64),
            bias_values=np.fromiter(sampling.logit_bias.values(), np.float32),
            end_ids=np.fromiter(sorted(ends), np.int64),
        )
