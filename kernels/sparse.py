"""Attention to a selection of positions (DeepSeek Sparse Attention, DeepSeek-AI 2025), on any
backend.

An *indexer* scores, for each query, every position up to the query's own; the query attends to the
``top_k`` positions with the highest scores. A query with no more than ``top_k`` positions attends
to all of them, and nothing is scored for it.

    index queries, index keys ──► select_slots ──► [tokens, top_k] slots ──► inner backend

A selection is a list of *slots* of the cache, and a list of slots is a block table of blocks of one
token. So every query becomes a row of its own over the same cache, seen in such blocks, and the
inner backend attends to it without knowing of selections:

    cache     block 7  [s0 s1 s2 s3]   block 2  [s0 s1 s2 s3]      block tables  [7, 2]
    selected           ^     ^                      ^              slots         [28, 30, 9]

Slots are in the order of their positions. Which positions are selected, and in which order they are
summed, depends on the query's own text alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    DeviceGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.transfer import to_device


class IndexQuery(NamedTuple):
    """What the tokens of a step select positions by."""

    query: torch.Tensor  # [num_tokens, index_heads, index_dim], rotated
    weights: torch.Tensor  # [num_tokens, index_heads] float32


class SelectionOperations(Protocol):
    """The kernels that select; part of ``kernels.operations.Operations``."""

    def selected_lengths(self, seq_lens: torch.Tensor, top_k: int, /) -> torch.Tensor:
        """See ``kernels.reference.sparse``."""
        ...

    def select_slots(
        self,
        index: IndexQuery,
        index_keys: torch.Tensor,
        tokens: DeviceGeometry,
        longest: int,
        slots: torch.Tensor,
        /,
    ) -> None:
        """See ``kernels.reference.sparse``."""
        ...


class PlansAndAttends(Protocol):
    """The part of an attention backend that attends to blocks of one token.

    Only the device's block tables are filled when it attends, and nothing else when it plans.
    """

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> Any:
        """See ``AttentionBackend.plan``."""
        ...

    def forward(
        self, state: Any, layer: LayerAttention, query: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        ...


@runtime_checkable
class SelectingAttention(AttentionBackend, Protocol):
    """A backend whose queries may attend to a selection of positions."""

    def selects(self, state: Any) -> bool:
        """Return whether some token of the step has more positions than it may attend to."""
        ...

    def select(self, state: Any, index: IndexQuery, index_keys: torch.Tensor) -> None:
        """Select the positions of the step's tokens, for this layer and those after it.

        Args:
            state: the result of ``plan`` for this step, which ``selects``.
            index: of the step's tokens.
            index_keys: [num_blocks, 1, block_size, index_dim], with the step's own.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Selection:
    """The tokens that attend to a selection."""

    among: torch.Tensor | None  # [m] int64, which of the step's tokens; None: all
    tokens: DeviceGeometry  # each is a row, which ends with it
    longest: int  # an upper bound of their numbers of positions
    slots: torch.Tensor  # [m, top_k] int32, overwritten by each layer that selects
    plan: Any  # of attention to ``slots``


@dataclass(frozen=True, slots=True)
class SparseState:
    """The plans of a step."""

    dense: Any | None  # of rows that attend to all of their positions; None: there are none
    dense_among: torch.Tensor | None  # [m] int64, their tokens; None: all of the step's
    selection: _Selection | None


class SparseAttention:
    """A backend for models with an indexer, built on one that attends to all positions.

    Args:
        inner: attends to the rows that have few positions.
        operations: select.
        over_slots: attends to selections; None: the inner backend.
    """

    def __init__(
        self,
        inner: AttentionBackend,
        operations: SelectionOperations,
        over_slots: PlansAndAttends | None = None,
    ) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable
        self._inner = inner
        self._operations = operations
        self._over_slots = inner if over_slots is None else over_slots

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if spec.selection is None or spec.value_dim is None:
            return "positions are selected in latent attention only"
        reason = self._inner.refuse(_of_slots(spec))
        return self._inner.refuse(spec) if reason is None else reason

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """See ``AttentionBackend.can_replay``."""
        top_k = _top_k(spec)
        bound, longest = (int(each.seq_lens.max()) for each in (captured, actual))
        if bound <= top_k:
            return longest <= top_k and self._inner.can_replay(captured, actual, spec)
        return longest <= bound and self._inner.can_replay(
            _clamped(captured, top_k), _clamped(actual, top_k), _of_slots(spec)
        )

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> SparseState:
        """See ``AttentionBackend.plan``.

        In a step of single tokens either all rows attend to a selection or none: such steps are
        captured, and a selection from few positions is all of them.
        """
        is_long = geometry.seq_lens > _top_k(spec)
        if not is_long.any():
            return SparseState(self._inner.plan(geometry, spec), None, None)
        if geometry.is_decode:
            longest = int(geometry.seq_lens.max())
            own = geometry.device
            lengths = self._operations.selected_lengths(own.seq_lens, _top_k(spec))
            bounds = geometry.seq_lens
            return SparseState(None, None, self._select_for(spec, own, lengths, bounds, longest))
        tokens, positions = _as_tokens(geometry, is_long, spec.device)
        lengths = self._operations.selected_lengths(tokens.seq_lens, _top_k(spec))
        longest = int(geometry.seq_lens[is_long].max())
        if is_long.all():
            chosen = self._select_for(spec, tokens, lengths, positions, longest)
            return SparseState(None, None, chosen)
        dense = self._inner.plan(_rows_of(geometry, ~is_long, spec.device), spec)
        among = _tokens_of(geometry, is_long, spec.device)
        return SparseState(
            dense,
            _tokens_of(geometry, ~is_long, spec.device),
            self._select_for(spec, tokens, lengths, positions, longest, among),
        )

    def selects(self, state: SparseState) -> bool:
        """See ``SelectingAttention``."""
        return state.selection is not None

    def select(self, state: SparseState, index: IndexQuery, index_keys: torch.Tensor) -> None:
        """See ``SelectingAttention``."""
        chosen = state.selection
        assert chosen is not None
        if chosen.among is not None:
            query, weights = (part.index_select(0, chosen.among) for part in index)
            index = IndexQuery(query, weights)
        self._operations.select_slots(
            index, index_keys, chosen.tokens, chosen.longest, chosen.slots
        )

    def forward(
        self,
        state: SparseState,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``; what the tokens selected last applies."""
        chosen = state.selection
        if chosen is None:
            return self._inner.forward(state.dense, layer, query, cache)
        slots = _in_single_slots(cache)
        if chosen.among is None:
            return self._over_slots.forward(chosen.plan, layer, query, slots)
        assert state.dense_among is not None
        output = query.new_empty((*query.shape[:-1], cache.values.shape[-1]))
        rows = query.index_select(0, state.dense_among)
        attended = self._inner.forward(state.dense, layer, rows, cache)
        output.index_copy_(0, state.dense_among, attended)
        rows = query.index_select(0, chosen.among)
        attended = self._over_slots.forward(chosen.plan, layer, rows, slots)
        return output.index_copy_(0, chosen.among, attended)

    def _select_for(
        self,
        spec: AttentionSpec,
        tokens: DeviceGeometry,
        lengths: torch.Tensor,
        positions: np.ndarray,
        longest: int,
        among: torch.Tensor | None = None,
    ) -> _Selection:
        """Plan for tokens with ``lengths`` selected positions of at most ``positions`` ones."""
        count, top_k = positions.size, _top_k(spec)
        slots = torch.empty((count, top_k), dtype=torch.int32, device=spec.device)
        starts = np.arange(count + 1, dtype=np.int32)
        # Each token is a row, so that the rows' numbers are their starts.
        on_device = DeviceGeometry(tokens.query_start, lengths, tokens.query_start[:-1], slots)
        over = BatchGeometry(
            starts,
            np.minimum(positions, top_k).astype(np.int32),
            starts[:-1],
            np.zeros((count, 1), np.int32),  # known only on the device, and there only later
            on_device,
        )
        plan = self._over_slots.plan(over, _of_slots(spec))
        return _Selection(among, tokens, longest, slots, plan)


def _top_k(spec: AttentionSpec) -> int:
    assert spec.selection is not None
    return spec.selection.top_k


def _of_slots(spec: AttentionSpec) -> AttentionSpec:
    """Return the attention to a selection: to all of a sequence of blocks of one token."""
    return replace(spec, block_size=1)


def _in_single_slots(cache: LayerCache) -> LayerCache:
    """Return a view of a cache of latents in blocks of one token."""
    keys = cache.keys.view(-1, 1, 1, cache.keys.shape[-1])
    return LayerCache(keys, keys[..., : cache.values.shape[-1]])


def _clamped(geometry: BatchGeometry, most: int) -> BatchGeometry:
    return replace(geometry, seq_lens=np.minimum(geometry.seq_lens, most).astype(np.int32))


def _as_tokens(
    geometry: BatchGeometry, is_among: np.ndarray, device: torch.device
) -> tuple[DeviceGeometry, np.ndarray]:
    """Return some rows' tokens as rows of their own, and how many positions each has."""
    counts = np.diff(geometry.query_start)[is_among]
    ends, lens = np.cumsum(counts), geometry.seq_lens[is_among]
    places = np.arange(int(counts.sum()))
    positions = (np.repeat(lens - ends, counts) + places + 1).astype(np.int32)
    starts = np.arange(places.size + 1, dtype=np.int32)
    lines = np.repeat(geometry.slots[is_among], counts).astype(np.int32)
    on_device = (to_device(torch.from_numpy(each), device) for each in (starts, positions, lines))
    query_start, seq_lens, slots = on_device
    return DeviceGeometry(query_start, seq_lens, slots, geometry.device.tables), positions


def _rows_of(geometry: BatchGeometry, is_among: np.ndarray, device: torch.device) -> BatchGeometry:
    """Return a batch of only some rows."""
    counts = np.diff(geometry.query_start)[is_among]
    query_start = np.append(0, np.cumsum(counts)).astype(np.int32)
    host = (query_start, geometry.seq_lens[is_among], geometry.slots[is_among])
    starts, lens, slots = (to_device(torch.from_numpy(each), device) for each in host)
    on_device = DeviceGeometry(starts, lens, slots, geometry.device.tables)
    return BatchGeometry(*host, geometry.tables, on_device)


def _tokens_of(geometry: BatchGeometry, is_among: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the numbers of some rows' tokens, [m] int64."""
    counts = np.diff(geometry.query_start)
    chosen = np.flatnonzero(np.repeat(is_among, counts))
    return to_device(torch.from_numpy(chosen), device)
