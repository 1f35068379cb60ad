"""The indexer of sparse attention, by ``native/sparse.cpp``."""

from __future__ import annotations

import torch

from kernels.attention import DeviceGeometry
from kernels.cpu.bindings import DTYPE_CODES, function, pointer
from kernels.cpu.layers import layer_norm
from kernels.sparse import IndexQuery


def index_rope_store(
    query: torch.Tensor | None,
    key: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    index_keys: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See ``kernels.reference.sparse``; ``query`` is contiguous."""
    normed = layer_norm(key, *norm, eps)
    cos, sin = rotation
    num_tokens, width = normed.shape
    function("quire_index_rope_store")(
        *(DTYPE_CODES[normed.dtype], pointer(query), normed.data_ptr()),
        *(cos.data_ptr(), sin.data_ptr(), slot_mapping.data_ptr(), num_tokens),
        *(0 if query is None else query.shape[1], width, cos.shape[-1], index_keys.data_ptr()),
    )


def index_weights(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See ``kernels.reference.sparse``."""
    x, (heads, hidden) = x.contiguous(), weight.shape
    out = torch.empty((x.shape[0], heads), dtype=torch.float32)
    function("quire_index_weights")(
        *(DTYPE_CODES[x.dtype], x.data_ptr(), x.shape[0], hidden),
        *(weight.data_ptr(), heads, out.data_ptr()),
    )
    return out


def selected_lengths(seq_lens: torch.Tensor, top_k: int) -> torch.Tensor:
    """See ``kernels.reference.sparse``."""
    out = torch.empty_like(seq_lens)
    count = seq_lens.numel()
    function("quire_selected_lengths")(seq_lens.data_ptr(), count, top_k, out.data_ptr())
    return out


def select_slots(
    index: IndexQuery,
    index_keys: torch.Tensor,
    tokens: DeviceGeometry,
    longest: int,
    slots: torch.Tensor,
) -> None:
    """See ``kernels.reference.sparse``; the lengths are read when the call is made."""
    query, weights = index
    count, heads, width = query.shape
    function("quire_select_slots")(
        *(DTYPE_CODES[query.dtype], query.data_ptr(), weights.data_ptr(), heads, width),
        *(index_keys.data_ptr(), tokens.seq_lens.data_ptr(), tokens.slots.data_ptr()),
        *(tokens.tables.data_ptr(), count, tokens.tables.shape[1], index_keys.shape[2]),
        *(slots.shape[1], slots.data_ptr()),
    )
