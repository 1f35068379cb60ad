"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-AI 2025), in plain torch.

The score of position s for the query at t is ``sum_h w_th relu(q_th . k_s)`` over index heads. Of
positions with equal scores the earlier ones come first; a score that is no number is the lowest.
"""

from __future__ import annotations

import torch

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    DeviceGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.reference.layers import layer_norm, rope
from kernels.sparse import IndexQuery

# Of gathered keys, in numbers; more tokens are taken one group after another.
_GROUP_NUMBERS = 2**22


def index_rope_store(
    query: torch.Tensor | None,
    key: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    index_keys: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate index queries; norm, rotate and store index keys.

    Args:
        query: [n, index_heads, index_dim], the first rope_dim of each head rotated in place; None:
            nothing is selected in this step.
        key: [n, index_dim].
        norm: weight and bias, [index_dim] each, of the layer norm of keys (Ba et al. 2016).
        eps: of that norm.
        rotation: cosines and sines, [n, 1, rope_dim / 2] float32 each.
        index_keys: [num_blocks, 1, block_size, index_dim], updated in place.
        slot_mapping: [n] int64, ``block * block_size + offset``; -1: a padding token, not stored.
    """
    turned = 2 * rotation[0].shape[-1]
    if query is not None:
        query[..., :turned] = rope(query[..., :turned], *rotation)
    normed = layer_norm(key, *norm, eps)
    first = rope(normed[:, None, :turned], *rotation).squeeze(1)
    is_stored = slot_mapping >= 0
    keys = torch.cat((first, normed[:, turned:]), dim=-1)[is_stored]
    index_keys.view(-1, keys.shape[-1]).index_copy_(0, slot_mapping[is_stored], keys)


def index_weights(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of index heads, ``x W^T`` in float32: [n, hidden_size] and [index_heads,
    hidden_size] float32 -> [n, index_heads] float32."""
    return x.float() @ weight.T


def selected_lengths(seq_lens: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return how many positions are selected of each number of them: [n] int32 -> [n] int32."""
    return seq_lens.clamp(max=top_k)


def select_slots(
    index: IndexQuery,
    index_keys: torch.Tensor,
    tokens: DeviceGeometry,
    longest: int,
    slots: torch.Tensor,
) -> None:
    """Select the slots of the ``top_k`` positions with the highest scores for each token.

    Args:
        index: of the tokens.
        index_keys: [num_blocks, 1, block_size, index_dim].
        tokens: each a row with one query; its own position is the last. A row of length 0 is
            padding.
        longest: an upper bound of their lengths.
        slots: [n, top_k] int32: overwritten with ``block * block_size + offset`` in the order of
            positions; what follows the last one of a token with fewer positions is left as it is.
    """
    block_size, width = index_keys.shape[2:]
    top_k = slots.shape[1]
    flat = index_keys.view(-1, width)
    for token, (length, line) in enumerate(
        zip(tokens.seq_lens.tolist(), tokens.slots.tolist(), strict=True)
    ):
        positions = torch.arange(length, device=slots.device)
        blocks = tokens.tables[line].index_select(0, positions // block_size).long()
        places = blocks * block_size + positions % block_size
        if length > top_k:
            query, weights = index.query[token].float(), index.weights[token]
            products = torch.relu(query @ flat[places].float().T)  # [index_heads, length]
            scores = (weights.unsqueeze(1) * products).sum(0)
            scores.masked_fill_(scores.isnan(), float("-inf"))
            # A stable order leaves equal scores in the order of their positions.
            best = torch.argsort(scores, descending=True, stable=True)[:top_k]
            places = places[best.sort().values]
        slots[token, : places.numel()] = places.to(slots.dtype)


class SlotAttention:
    """Attention to lists of slots, the same number for each query or fewer."""

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> DeviceGeometry:
        """Return the device's geometry: the lists are filled later."""
        return geometry.device

    def forward(
        self,
        state: DeviceGeometry,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Attend to a cache of blocks of one slot; see ``AttentionBackend.forward``."""
        width, value_dim = cache.keys.shape[-1], cache.values.shape[-1]
        output = query.new_empty((*query.shape[:-1], value_dim))
        step = max(1, _GROUP_NUMBERS // (state.tables.shape[1] * width))
        for begin in range(0, query.shape[0], step):
            part = slice(begin, begin + step)
            lengths = state.seq_lens[part].unsqueeze(1)
            is_used = torch.arange(state.tables.shape[1], device=query.device) < lengths
            slots = state.tables[part].long().masked_fill(~is_used, 0)
            keys = cache.keys.view(-1, width)[slots].float()  # [tokens, top_k, width]
            keys.masked_fill_(~is_used.unsqueeze(2), 0.0)
            scores = (query[part].float() * layer.scale) @ keys.transpose(1, 2)
            scores.masked_fill_(~is_used.unsqueeze(1), float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            output[part] = (weights @ keys[..., :value_dim]).to(query.dtype)
        return output
