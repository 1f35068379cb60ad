"""The attention backend ``triton``: single queries to the decode kernel, the rest to the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import AttentionSpec, BatchGeometry, LayerAttention, LayerCache
from kernels.triton.decode import decode_attention
from kernels.triton.decode_plan import DecodePlan, num_splits, plan_decode
from kernels.triton.launch import refuse_device
from kernels.triton.prefill import PrefillPlan, plan_prefill, prefill_attention

_MAX_HEAD_DIM = 256
_MAX_GROUP = 128  # rows of a prefill tile


@dataclass(frozen=True, slots=True)
class TritonState:
    """What the layers of one step share."""

    decode: dict[int | None, DecodePlan]  # by window; empty where no row has a single query
    prefill: PrefillPlan | None


class TritonAttention:
    """Paged attention by ``decode.py`` and ``prefill.py``."""

    name = "triton"

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if (reason := refuse_device(spec.device)) is not None:
            return reason
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads do not share {spec.num_kv_heads} KV heads evenly"
        if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
            return f"more than {_MAX_GROUP} heads share a KV head"
        if spec.head_dim > _MAX_HEAD_DIM:
            return f"a head size of {spec.head_dim} is over {_MAX_HEAD_DIM}"
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"no kernel for {spec.dtype}"
        return None

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> TritonState:
        """Two transfers to the device, whatever the batch."""
        lengths = np.diff(geometry.query_start)
        single, several = np.flatnonzero(lengths == 1), np.flatnonzero(lengths != 1)
        # The single queries first: either kernel then has its rows in one slice.
        order = np.concatenate((single, several))
        packed = np.concatenate(
            (
                geometry.query_start[order, None],
                lengths[order, None],
                geometry.seq_lens[order, None],
                geometry.block_tables(spec.block_size)[order],
            ),
            axis=1,
        )
        on_device = torch.from_numpy(packed.astype(np.int32)).to(spec.device)
        num_single = single.size
        return TritonState(
            decode=_plan_windows(on_device[:num_single], geometry.seq_lens[single], spec),
            prefill=_plan_chunks(
                on_device[num_single:], lengths[several], geometry.seq_lens[several], spec
            ),
        )

    def forward(
        self,
        state: TritonState,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``. Scores and sums are float32 whatever the dtype."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if state.decode:
            decode_attention(state.decode[layer.window], layer, query, cache, output)
        if state.prefill is not None:
            prefill_attention(state.prefill, layer, query, cache, output)
        return output


def _plan_windows(
    packed: torch.Tensor, seq_lens: np.ndarray, spec: AttentionSpec
) -> dict[int | None, DecodePlan]:
    if seq_lens.size == 0:
        return {}
    begins, _, lens = packed[:, :3].T.contiguous()
    capacity = int(num_splits(seq_lens).sum())
    return {
        window: plan_decode(begins, lens, packed[:, 3:], window, capacity)
        for window in spec.windows
    }


def _plan_chunks(
    packed: torch.Tensor, lengths: np.ndarray, seq_lens: np.ndarray, spec: AttentionSpec
) -> PrefillPlan | None:
    if lengths.size == 0:
        return None
    group = spec.num_heads // spec.num_kv_heads
    begins, query_lens, lens = packed[:, :3].T.contiguous()
    return plan_prefill(lengths, seq_lens, group, begins, query_lens, lens, packed[:, 3:])
