"""The attention backend ``triton``: one kernel for single queries, another for the rest."""

from __future__ import annotations

import torch

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.triton.decode import decode_attention
from kernels.triton.invariant_decode import invariant_decode
from kernels.triton.invariant_prefill import invariant_prefill
from kernels.triton.latent import MAX_RANK, latent_decode, latent_prefill
from kernels.triton.launch import device_unsupported_reason
from kernels.triton.plan import plan_attention
from kernels.triton.prefill import prefill_attention
from kernels.triton.sparse import unsupported_reason
from kernels.triton.work import TILE_ROWS, UNIT, AttentionPlan, WorkBounds

_MAX_HEAD_DIM = 512
# So many queries with a selection each keep the GPU busy without splits, whose sums would take
# more memory than what is selected.
MANY_SELECTIONS = 128
_MAX_HEAD_DIM_FLOAT32 = 256  # a tile of wider queries would not fit in shared memory


class TritonAttention:
    """Paged attention by ``decode.py`` and ``prefill.py``, or by ``invariant_attention.py``."""

    name = "triton"
    is_capturable = True

    def __init__(self, *, invariant: bool = False) -> None:
        """``invariant``: a query's result has the same bits in a chunk of any size, including one.

        That takes ``invariant_attention.py``, and for latents the chunk kernel for all queries.
        (Otherwise a row's keys are cut where the batch's shares end; see ``decode.py``.)
        """
        self._invariant = invariant

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if (reason := device_unsupported_reason(spec.device)) is not None:
            return reason
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads do not share {spec.num_kv_heads} KV heads evenly"
        if spec.num_heads // spec.num_kv_heads > TILE_ROWS:
            return f"more than {TILE_ROWS} heads share a KV head"
        if spec.has_slopes:
            return "scores that fall with distance (ALiBi) have no kernel"
        if spec.is_bidirectional and (self._invariant or spec.value_dim is not None):
            kind = "batch-invariant" if self._invariant else "latent"
            return f"{kind} attention has no kernel for queries that see what is behind them"
        if spec.selection is not None:
            reason = unsupported_reason(spec.selection.num_heads, spec.selection.head_dim)
            if reason is not None:
                return reason
        if spec.value_dim is not None:
            return _latent_unsupported_reason(spec, spec.value_dim)
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"no kernel for {spec.dtype}"
        most = _MAX_HEAD_DIM_FLOAT32 if spec.dtype == torch.float32 else _MAX_HEAD_DIM
        if spec.head_dim > most:
            return f"a head size of {spec.head_dim} is over {most}, in {spec.dtype}"
        return None

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> AttentionPlan:
        """Make the plan in one launch without transfers, so that a CUDA graph can capture it."""
        bounds = self._bounds(geometry, spec)
        return plan_attention(
            bounds, geometry.device, spec.windows, _group(spec), spec.num_kv_heads
        )

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """Return whether a batch can be replayed in a CUDA graph captured with these bounds.

        Missing rows are filled with padding: one query each, of length 0. Rows are not bounded one
        by one, only the sums of their splits and query tiles.
        """
        if self._has_units(spec) and captured.is_decode and actual.is_decode:
            return actual.num_rows <= captured.num_rows  # in time for every step
        bounds = self._bounds(captured, spec)
        return bounds.covers(self._bounds(actual, spec, tiles_only=bounds.tiles_only))

    def forward(
        self,
        state: AttentionPlan,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``. Scores and sums are float32 for any dtype.

        The output of a row of length 0 (padding of a captured batch) is 0.
        """
        shape = (*query.shape[:-1], cache.values.shape[-1])
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
        if cache.has_shared_values:
            query = query.contiguous()
            if state.splits:
                latent_decode(state, layer, query, cache, output)
            if state.tiles is not None:
                latent_prefill(state, layer, query, cache, output)
            return output
        decode = invariant_decode if self._invariant else decode_attention
        prefill = invariant_prefill if self._invariant else prefill_attention
        if state.splits or state.units:
            decode(state, layer, query, cache, output)
        if state.tiles is not None:
            prefill(state, layer, query, cache, output)
        return output

    def _bounds(
        self, geometry: BatchGeometry, spec: AttentionSpec, *, tiles_only: bool | None = None
    ) -> WorkBounds:
        """``tiles_only``: as in the bounds to compare with."""
        group, is_latent = _group(spec), spec.value_dim is not None
        if not self._has_units(spec):
            if tiles_only is None:
                is_selected = spec.selection is not None and spec.block_size == 1
                are_many = is_selected and geometry.num_rows >= MANY_SELECTIONS
                tiles_only = is_latent and (self._invariant or are_many)
            return WorkBounds.of(geometry, group, tiles_only=tiles_only)
        return WorkBounds.of(geometry, group, tiles_only=False, split_size=UNIT)

    def _has_units(self, spec: AttentionSpec) -> bool:
        """Return whether single queries are divided into equal shares (``decode.py``)."""
        return not self._invariant and spec.value_dim is None


def _latent_unsupported_reason(spec: AttentionSpec, rank: int) -> str | None:
    if spec.num_kv_heads != 1 or spec.has_sinks or spec.softcap or spec.windows != (None,):
        return "latent attention has no kernel for several KV heads, sinks, caps or windows"
    if rank > MAX_RANK or not 0 < spec.head_dim - rank <= MAX_RANK // 4:
        return f"latents of {rank} in keys of {spec.head_dim} have no kernel"
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no kernel for {spec.dtype}"
    return None


def _group(spec: AttentionSpec) -> int:
    return spec.num_heads // spec.num_kv_heads
