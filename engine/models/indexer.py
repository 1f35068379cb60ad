"""The indexer of sparse attention: which positions a query attends to (DeepSeek-AI 2025, V3.2).

A layer's indexer has heads of its own, small ones. Its queries are made from the queries' latent,
its one key per token from the layer's input, and its heads' weights from that too:

    x ─► key ─► layer norm ─► rope ─► cache          score of s at t:  sum_h w_th relu(q_th . k_s)
    queries' latent ─► query ─► rope ─► q
    x ─► weights, in float32 ─► w                    the top_k highest are attended to

Factors that all of a token's scores have in common are left out: they change no choice.

DeepSeek's own code also turns queries and keys by a Hadamard matrix, which changes no product, and
rounds them to fp8. Here they keep the model's precision, as in Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine.models.latent_spec import IndexerSpec
from engine.models.linear import Linear, LinearMethod, Weight, permute_outputs
from engine.models.loader import load_matrix
from engine.models.spec import DecoderSpec
from kernels.attention import LayerCache
from kernels.operations import Kernels
from kernels.sparse import IndexQuery, SelectingAttention


class IndexerWeights(NamedTuple):
    """The loaded weights of a layer's indexer."""

    query: Linear  # from the queries' latent
    key: Linear
    key_norm: tuple[torch.Tensor, torch.Tensor]  # weight and bias, [head_dim] each
    weights: torch.Tensor  # [num_heads, hidden_size] float32

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        tensors = (*self.key_norm, self.weights)
        own = sum(tensor.nbytes for tensor in tensors)
        return own + self.query.num_bytes + self.key.num_bytes


def make_indexer(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], method: LinearMethod, i: int
) -> IndexerWeights | None:
    """Make the indexer of layer ``i``; None if it has none.

    It takes ownership of the parameters.
    """
    latent = spec.latent
    indexer = None if latent is None else latent.indexer
    if indexer is None or spec.layers[i - spec.first_layer].shares_selection:
        return None
    query, key = (load_matrix(weights, f"{i}.index.{name}.weight") for name in ("query", "key"))
    norm = weights[f"{i}.index.key_norm"], weights[f"{i}.index.key_norm.bias"]
    order = _row_order(indexer, spec.rope_head_dim)
    if order is not None:
        query, key = _permute_heads(query, order, indexer.num_heads), permute_outputs(key, order)
        at = order.to(norm[0].device)
        norm = norm[0][at], norm[1][at]
    return IndexerWeights(
        query=method.make(query, None),
        key=method.make(key, None),
        key_norm=norm,
        weights=weights[f"{i}.index.weights"],
    )


class Indexer:
    """One layer's indexer.

    Args:
        indexer: of the model.
        weights: of the layer.
        kernels: their attention attends to what is selected.
    """

    def __init__(self, indexer: IndexerSpec, weights: IndexerWeights, kernels: Kernels) -> None:
        assert isinstance(kernels.attention, SelectingAttention)
        self._indexer = indexer
        self._weights = weights
        self._attention: SelectingAttention = kernels.attention
        self._operations = kernels.operations

    def __call__(
        self,
        read: torch.Tensor,
        query_latent: torch.Tensor,
        attention_plan: object,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store the tokens' index keys, and select the positions of each, if there is a choice.

        Args:
            read: [n, hidden_size], the layer's input.
            query_latent: [n, query_rank], normed.
            attention_plan: of the step.
            rotation: of the step's positions.
            cache: the layer's blocks; its index keys are updated in place.
            slot_mapping: [n] int64, the tokens' slots.
        """
        weights, do, index_keys = self._weights, self._operations, cache.index_keys
        assert index_keys is not None
        query: torch.Tensor | None = None
        if self._attention.selects(attention_plan):
            query = weights.query(query_latent).unflatten(-1, (self._indexer.num_heads, -1))
        do.index_rope_store(
            query,
            weights.key(read),
            weights.key_norm,
            self._indexer.eps,
            rotation,
            index_keys,
            slot_mapping,
        )
        if query is not None:
            index = IndexQuery(query, do.index_weights(read, weights.weights))
            self._attention.select(attention_plan, index, index_keys)


def _row_order(indexer: IndexerSpec, rope_dim: int) -> torch.Tensor | None:
    """Return the order of a head's dimensions in which the kernels rotate them; None: as stored."""
    if not indexer.interleaved:
        return None
    pairs = torch.arange(rope_dim).view(-1, 2).T.flatten()
    return torch.cat((pairs, torch.arange(rope_dim, indexer.head_dim)))


def _permute_heads(weight: Weight, order: torch.Tensor, num_heads: int) -> Weight:
    begins = torch.arange(num_heads).unsqueeze(1) * order.numel()
    return permute_outputs(weight, (begins + order).flatten())
