"""Paged attention in plain torch, for any device: exact, and reasonably fast.

Rows with one query token (decode) are batched: sorted by length, cut into buckets of similar
length, each of which is a gather of its blocks and two batched products. Rows with several (prompt
chunks) go one by one through ``scaled_dot_product_attention``. Chunks have no padding, and the
padding of a bucket is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from kernels.attention import AttentionSpec, BatchGeometry, LayerAttention, LayerCache
from kernels.reference.cache_quantisation import as_bytes, decode

# Padded token slots in a bucket above which the calls for another bucket are cheaper.
_BUCKET_WASTE_SLOTS = 4096
# Size of a bucket's gathered keys (and of its values). On a CPU these should still be in the cache
# when the product reads them; on a GPU the number of calls dominates.
_BUCKET_BYTES = {"cpu": 2 * 2**20, "cuda": 128 * 2**20}


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Decode rows of similar length; L is the padded number of slots, in whole blocks."""

    tokens: torch.Tensor | None  # [rows] their indices in the batch; None: the whole batch in order
    block_rows: torch.Tensor  # [rows * kv_heads * L / block_size] rows of the cache to gather
    masked: torch.Tensor | None  # [rows, 1, 1, L] bool, or None when nothing is masked
    empty_slots: torch.Tensor | None  # gathered slots past a sequence's end
    distances: torch.Tensor | None  # [rows, 1, 1, L] float32, of keys from the query


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The prompt chunk of one row: queries [begin, end) of the batch over L gathered slots."""

    begin: int
    end: int
    block_rows: torch.Tensor  # [kv_heads * blocks]
    first: int  # the first used slot among those gathered
    last: int  # one past the last
    mask: torch.Tensor | None  # [queries, last - first] bool, True if seen; None: causal
    distances: torch.Tensor | None  # [queries, last - first] float32, of keys from queries


@dataclass(frozen=True, slots=True)
class _WindowPlan:
    buckets: tuple[_Bucket, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """A step's plans by window, and two buffers for the keys and values its layers gather.

    The buffers are allocated once per step, not per layer: fresh pages cost more than filling them.
    """

    plans: dict[tuple[int | None, bool], _WindowPlan]  # by window, and whether queries look ahead
    keys: torch.Tensor  # [rows of the largest gather, block_size * head_dim] in the cache's dtype
    values: torch.Tensor  # the same; the keys' own if values are parts of keys


class ReferenceAttention:
    """The backend that works everywhere, and that the others are tested against."""

    name = "reference"
    is_capturable = False

    def refuse(self, spec: AttentionSpec) -> str | None:
        """Refuse only head counts that do not divide."""
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads do not share {spec.num_kv_heads} KV heads evenly"
        return None

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """Return False: the plan is made on the host."""
        return False

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> ReferenceState:
        """Make the step's index tensors and masks, one set for each distinct window, and another
        one for queries that may look ahead."""
        batch = _Batch(
            geometry.query_start.astype(np.int64),
            geometry.seq_lens.astype(np.int64),
            geometry.block_tables(spec.block_size),
        )
        query_lens = np.diff(batch.query_start)
        decode = np.flatnonzero(query_lens == 1)
        chunks = np.flatnonzero(query_lens != 1)
        plans = {
            (window, ends is not None): _WindowPlan(
                _plan_buckets(batch, spec, decode, window),
                tuple(_plan_chunk(batch, spec, int(row), window, ends) for row in chunks),
            )
            for window in spec.windows
            for ends in ((None,) if geometry.query_ends is None else (None, geometry.query_ends))
        }
        largest = max(
            part.block_rows.numel()
            for plan in plans.values()
            for part in plan.buckets + plan.chunks
        )
        shape = (largest, spec.block_size * spec.head_dim)
        keys = torch.empty(shape, dtype=spec.stored_dtype, device=spec.device)
        values = keys if spec.value_dim is not None else torch.empty_like(keys)
        return ReferenceState(plans, keys, values)

    def forward(
        self,
        state: ReferenceState,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``. Computes in float32 for any dtype."""
        plan = state.plans[layer.window, False]
        if layer.is_bidirectional:
            plan = state.plans.get((layer.window, True), plan)
        kv_heads = cache.keys.shape[1]
        output = query.new_empty((*query.shape[:-1], cache.values.shape[-1]))
        for bucket in plan.buckets:
            keys, values = _gather(state, cache, bucket.block_rows)
            if bucket.tokens is None:
                return _decode(bucket, layer, query, keys, values, kv_heads)
            rows = query.index_select(0, bucket.tokens)
            attended = _decode(bucket, layer, rows, keys, values, kv_heads)
            output.index_copy_(0, bucket.tokens, attended)
        for chunk in plan.chunks:
            keys, values = _gather(state, cache, chunk.block_rows)
            rows = query[chunk.begin : chunk.end]
            attended = _attend_chunk(chunk, layer, rows, keys, values, kv_heads)
            output[chunk.begin : chunk.end] = attended
        return output


def _decode(
    bucket: _Bucket,
    layer: LayerAttention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_heads: int,
) -> torch.Tensor:
    """Attend single queries [rows, heads, head_dim] to gathered [rows * kv_heads * L, ...]."""
    num_rows, num_heads, head_dim = query.shape
    group = num_heads // kv_heads
    if bucket.empty_slots is not None:
        # Slots past the end are unowned and may hold anything: 0 * nan is nan.
        values.index_fill_(0, bucket.empty_slots, 0.0)
    keys = keys.view(num_rows * kv_heads, -1, head_dim)
    values = values.unflatten(0, (num_rows * kv_heads, -1))
    grouped = (query.float() * layer.scale).view(num_rows * kv_heads, group, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2))  # [rows * kv_heads, group, L]
    if layer.slopes is not None and bucket.distances is not None:
        slopes = layer.slopes.view(1, kv_heads, group, 1)
        scores.view(num_rows, kv_heads, group, -1).addcmul_(slopes, bucket.distances)
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if bucket.masked is not None:
        scores.view(num_rows, kv_heads, group, -1).masked_fill_(bucket.masked, float("-inf"))
    sinks = None if layer.sinks is None else layer.sinks.view(1, kv_heads, group, 1)
    weights = _softmax(scores.view(num_rows, kv_heads, group, -1), sinks)
    output = torch.bmm(weights.view(scores.shape), values)
    return output.view(num_rows, num_heads, -1).to(query.dtype)


def _attend_chunk(
    chunk: _Chunk,
    layer: LayerAttention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_heads: int,
) -> torch.Tensor:
    """Attend one sequence's queries [n, heads, head_dim] to gathered [kv_heads * L, ...]."""
    num_heads = query.shape[1]
    used = slice(chunk.first, chunk.last)
    keys = keys.unflatten(0, (kv_heads, -1))[:, used]
    values = values.unflatten(0, (kv_heads, -1))[:, used]
    heads = query.float().transpose(0, 1)  # [heads, n, head_dim]
    if layer.softcap is None and layer.sinks is None and layer.slopes is None:
        output = functional.scaled_dot_product_attention(
            heads.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=layer.scale,
            enable_gqa=num_heads != kv_heads,
        ).squeeze(0)
    else:
        grouped = heads.reshape(kv_heads, -1, *heads.shape[1:])
        scores = (grouped * layer.scale) @ keys.unsqueeze(1).transpose(2, 3)
        if layer.slopes is not None and chunk.distances is not None:
            scores.addcmul_(layer.slopes.view(kv_heads, -1, 1, 1), chunk.distances)
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        seen = chunk.mask
        if seen is None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril_()
        scores.masked_fill_(~seen, float("-inf"))
        sinks = None if layer.sinks is None else layer.sinks.view(kv_heads, -1, 1, 1)
        output = (_softmax(scores, sinks) @ values.unsqueeze(1)).flatten(0, 1)
    return output.transpose(0, 1).to(query.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension; a sink is one more score, whose weight is dropped."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    with_sink = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(with_sink, dim=-1)[..., :-1]


def _gather(
    state: ReferenceState, cache: LayerCache, block_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of single heads of blocks, in float32: [slots, head_dim] of each.

    The order is that of ``block_rows``; the result is valid until the next call.
    """
    num_blocks, kv_heads, block_size, head_dim = cache.keys.shape
    gathered = []
    stores = [
        (cache.keys, state.keys, cache.key_scales),
        (cache.values, state.values, cache.value_scales),
    ]
    for stored, buffer, scales in stores[:1] if cache.has_shared_values else stores:
        flat = stored.view(num_blocks * kv_heads, block_size * head_dim)
        part = buffer[: block_rows.numel()]
        torch.index_select(as_bytes(flat), 0, block_rows, out=as_bytes(part))
        rows = part.view(-1, head_dim)
        if scales is None:
            gathered.append(rows.float())
        else:
            flat_scales = scales.view(num_blocks * kv_heads, block_size)
            gathered.append(decode(rows, flat_scales.index_select(0, block_rows).flatten()))
    if cache.has_shared_values:
        gathered.append(gathered[0][:, : cache.values.shape[-1]])
    return gathered[0], gathered[1]


# ------------------------------------------------------------------------------- planning


class _Batch(NamedTuple):
    """The host's part of a geometry."""

    query_start: np.ndarray  # [rows + 1] int64
    seq_lens: np.ndarray  # [rows] int64
    block_tables: np.ndarray  # [rows, blocks] int64


def _plan_buckets(
    batch: _Batch, spec: AttentionSpec, rows: np.ndarray, window: int | None
) -> tuple[_Bucket, ...]:
    """Divide the decode rows, longest first, so that no bucket wastes too many slots."""
    if rows.size == 0:
        return ()
    first_block, num_blocks = _visible_blocks(batch.seq_lens[rows], 1, window, spec.block_size)
    order = np.argsort(-num_blocks, kind="stable")
    all_rows = rows.size == batch.seq_lens.size
    buckets: list[_Bucket] = []
    begin = 0
    while begin < order.size:
        longest = num_blocks[order[begin]]
        waste = np.cumsum(longest - num_blocks[order[begin:]]) * spec.block_size
        fitting = max(1, _bucket_slots(spec) // int(longest * spec.block_size))
        end = begin + min(int(np.searchsorted(waste, _BUCKET_WASTE_SLOTS, side="right")), fitting)
        chosen = order[begin:end]
        whole = all_rows and chosen.size == order.size
        if whole:
            chosen = np.sort(chosen)  # batch order: no gather of queries
        bucket = _make_bucket(
            batch, spec, rows[chosen], first_block[chosen], int(longest), window, whole
        )
        buckets.append(bucket)
        begin = end
    return tuple(buckets)


def _bucket_slots(spec: AttentionSpec) -> int:
    budget = _BUCKET_BYTES.get(spec.device.type, _BUCKET_BYTES["cpu"])
    return budget // (spec.num_kv_heads * spec.head_dim * 4)


def _make_bucket(
    batch: _Batch,
    spec: AttentionSpec,
    rows: np.ndarray,
    first_block: np.ndarray,
    num_blocks: int,
    window: int | None,
    whole: bool,
) -> _Bucket:
    size, device = spec.block_size, spec.device
    # Past a row's end the table holds 0, and columns are limited to the table: any block will do.
    columns = first_block[:, None] + np.arange(num_blocks)
    columns = np.minimum(columns, batch.block_tables.shape[1] - 1)
    blocks = np.take_along_axis(batch.block_tables[rows], columns, axis=1)
    positions = first_block[:, None] * size + np.arange(num_blocks * size)  # [rows, L]
    seq_lens = batch.seq_lens[rows][:, None]
    past_end = positions >= seq_lens
    masked = past_end if window is None else past_end | (positions < seq_lens - window)
    tokens = None if whole else torch.from_numpy(batch.query_start[rows]).to(device)
    distances: torch.Tensor | None = None
    if spec.has_slopes:
        from_query = (positions - (seq_lens - 1)).astype(np.float32)
        distances = torch.from_numpy(from_query)[:, None, None].to(device)
    return _Bucket(
        tokens=tokens,
        block_rows=_head_rows(blocks, spec.num_kv_heads).to(device),
        masked=torch.from_numpy(masked)[:, None, None].to(device) if masked.any() else None,
        empty_slots=_empty_slots(past_end, spec.num_kv_heads, device),
        distances=distances,
    )


def _empty_slots(past_end: np.ndarray, kv_heads: int, device: torch.device) -> torch.Tensor | None:
    """Return the rows of the gathered [rows * kv_heads * L, head_dim] past a sequence's end."""
    row, slot = np.nonzero(past_end)
    if row.size == 0:
        return None
    heads = np.arange(kv_heads)[:, None]
    empty = (row * kv_heads + heads) * past_end.shape[1] + slot  # [kv_heads, empty slots]
    return torch.from_numpy(empty.ravel()).to(device)


def _plan_chunk(
    batch: _Batch, spec: AttentionSpec, row: int, window: int | None, ends: np.ndarray | None
) -> _Chunk:
    begin, end = (int(at) for at in batch.query_start[row : row + 2])
    queries, seq_len = end - begin, int(batch.seq_lens[row])
    lengths = batch.seq_lens[row : row + 1]
    first_block, num_blocks = _visible_blocks(lengths, queries, window, spec.block_size)
    skipped = int(first_block[0])
    blocks = batch.block_tables[row : row + 1, skipped : skipped + int(num_blocks[0])]
    start = seq_len - queries
    first = 0 if window is None else max(0, start - window + 1)
    keys = np.arange(first, seq_len)
    places = np.arange(start, seq_len)[:, None]
    mask = None
    if start > 0 or ends is not None or (window is not None and queries > window):
        seen = keys < (places + 1 if ends is None else ends[begin:end, None])
        if window is not None:
            seen &= keys > places - window
        mask = torch.from_numpy(seen).to(spec.device)
    distances: torch.Tensor | None = None
    if spec.has_slopes:
        distances = torch.from_numpy((keys - places).astype(np.float32)).to(spec.device)
    offset = skipped * spec.block_size
    return _Chunk(
        begin=begin,
        end=end,
        block_rows=_head_rows(blocks, spec.num_kv_heads).to(spec.device),
        first=first - offset,
        last=seq_len - offset,
        mask=mask,
        distances=distances,
    )


def _visible_blocks(
    seq_lens: np.ndarray, num_queries: int, window: int | None, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first block that each sequence's last queries attend to, and how many."""
    ends = -(-seq_lens // block_size)
    if window is None:
        return np.zeros_like(seq_lens), ends
    first_seen = np.maximum(seq_lens - num_queries - window + 1, 0)
    return first_seen // block_size, ends - first_seen // block_size


def _head_rows(blocks: np.ndarray, kv_heads: int) -> torch.Tensor:
    """Return rows of a cache viewed as [num_blocks * kv_heads, ...], heads before blocks: [r, b] ->
    flat.

    In this order the gathered slots of a head are contiguous, as the batched products need them.
    """
    heads = np.arange(kv_heads)[None, :, None]
    return torch.from_numpy((blocks[:, None, :] * kv_heads + heads).ravel())
