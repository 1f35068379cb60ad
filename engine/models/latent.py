"""Multi-head latent attention, computed on the latents themselves (DeepSeek-V2, DeepSeek-AI 2024).

A token's keys and values are linear in one latent c, which all heads share: k_h = K_h c and v_h =
V_h c. The key also has a rotated part r, shared by all heads. Therefore

    q_h . k_h + t_h . r  =  (K_h^T q_h) . c + t_h . r        sum_j w_j v_hj  =  V_h sum_j w_j c_j

and attention has one KV head with key [c, r] and value c. Only these are cached; K_h and V_h are
*absorbed* into what comes before and after.

    x ─► projection ─┬─► (norm ─► query_up) ─► q, t ─► K_h^T q, t rotated ─┐
                     └─► norm(c), r rotated ─► cache ──────────────────────┴─► attention ─► V_h
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch

from engine.models.adapters import Adapters, project
from engine.models.indexer import Indexer, IndexerWeights, make_indexer
from engine.models.latent_spec import LatentSpec
from engine.models.linear import Linear, LinearMethod, PerHeadLinear, permute_outputs
from engine.models.loader import load_matrix
from engine.models.rope import rotary_order
from engine.models.spec import DecoderSpec, TemperatureSpec
from kernels.attention import LayerAttention, LayerCache
from kernels.operations import Kernels, Operations


class LatentWeights(NamedTuple):
    """The loaded weights of a layer's attention, without its first and last projections."""

    norm: torch.Tensor  # [rank], of the latent
    query_norm: torch.Tensor | None  # [query_rank], if queries have a latent too
    query_up: Linear | None
    key_up: PerHeadLinear  # K_h^T, from nope_dim to rank
    value_up: PerHeadLinear  # V_h, from rank to value_dim
    indexer: IndexerWeights | None = None  # None: all positions, or another layer's selection

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        tensors = (self.norm, self.query_norm)
        products = (self.query_up, self.key_up, self.value_up, self.indexer)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None) + sum(
            product.num_bytes for product in products if product is not None
        )


class Step(Protocol):
    """What attention needs to know of a step."""

    @property
    def attention(self) -> object:
        """The backend's plan."""
        ...

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[num_tokens] int64: the cache slot of each token's latent."""
        ...

    @property
    def positions(self) -> torch.Tensor:
        """[num_tokens] int64: each token's position in its sequence."""
        ...

    @property
    def adapters(self) -> Adapters | None:
        """Those of the tokens; None: no row has one."""
        ...


class _AbsorbedDelta(NamedTuple):
    """An adapter's delta to K and V."""

    tokens: torch.Tensor  # [m] int64
    down: torch.Tensor  # [r, rank]
    key_up: torch.Tensor  # [r, num_heads, nope_dim]
    value_up: torch.Tensor  # [r, num_heads, value_dim]


def make_latent(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], method: LinearMethod, i: int
) -> LatentWeights | None:
    """Make the weights of layer ``i``; None if the model has no latent attention.

    The layer takes ownership of the parameters.
    """
    latent = spec.latent
    if latent is None:
        return None
    up = weights[f"{i}.latent_up"].view(spec.num_heads, -1, latent.rank)
    key_up, value_up = up.split((latent.nope_dim, latent.value_dim), dim=1)
    query_up = None
    if latent.query_rank is not None:
        weight = load_matrix(weights, f"{i}.query_up.weight")
        order = query_row_order(spec, latent)
        query_up = method.make(weight if order is None else permute_outputs(weight, order), None)
    return LatentWeights(
        norm=weights[f"{i}.latent_norm"].mul_(latent.scale),
        query_norm=weights.get(f"{i}.query_norm"),
        query_up=query_up,
        key_up=method.make_per_head(key_up.transpose(1, 2)),
        value_up=method.make_per_head(value_up),
        indexer=make_indexer(spec, weights, method, i),
    )


def latent_qkv_row_order(spec: DecoderSpec, latent: LatentSpec) -> torch.Tensor | None:
    """Return the order of the first projection's rows in which the kernels rotate them.

    See ``rotary_order``; None: as they are.
    """
    order = rotary_order(spec)
    if order is None:
        return None
    num_queries, _ = latent.qkv_sizes(spec.num_heads)
    kept = torch.arange(num_queries + latent.rank)
    if latent.query_rank is None:
        queries = query_row_order(spec, latent)
        assert queries is not None
        kept = torch.cat((queries, kept[num_queries:]))
    rows = torch.cat((kept, kept.numel() + order))
    return torch.cat((torch.arange(spec.gate_size), spec.gate_size + rows))  # gates are first


class LatentAttention:
    """One layer's attention between its first and last projections.

    Args:
        spec, latent: of the model.
        weights: of the layer.
        attention: of the layer.
        kernels: compute it.
        index: the layer's number.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        latent: LatentSpec,
        weights: LatentWeights,
        attention: LayerAttention,
        kernels: Kernels,
        index: int,
    ) -> None:
        self._query_name, self._up_name = f"{index}.query_up.weight", f"{index}.latent_up"
        self._num_heads = spec.num_heads
        self._latent = latent
        self._temperature = spec.temperature
        self._weights = weights
        self._layer = attention
        self._attention, self._operations = kernels
        self._indexer: Indexer | None = None
        if weights.indexer is not None and latent.indexer is not None:
            self._indexer = Indexer(latent.indexer, weights.indexer, kernels)

    def __call__(
        self,
        projected: torch.Tensor,
        step: Step,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the tokens' latents, and attend.

        Args:
            projected: [n, the input of the queries, then rank + rope_dim].
            step: its plan, slots and positions.
            rotation: of the step's positions.
            cache: the layer's blocks, updated in place.
            read: [n, hidden_size], what ``projected`` is made from; for an indexer.

        Returns:
            [n, num_heads * value_dim].
        """
        spec, weights, do = self._latent, self._weights, self._operations
        made_from, latent = projected.split(spec.qkv_sizes(self._num_heads), dim=-1)
        if weights.query_up is not None:
            assert weights.query_norm is not None
            normed = do.rms_norm(made_from, weights.query_norm, spec.eps)
            read_from = torch.cat((normed, made_from), dim=-1) if spec.gates_output else normed
            made_from = project(weights.query_up, read_from, step.adapters, self._query_name)
            if self._indexer is not None:
                assert read is not None
                where = (step.attention, rotation, cache, step.slot_mapping)
                self._indexer(read, normed, *where)
        gate: torch.Tensor | None = None
        if spec.gates_output:
            made_from, gate = _split_gates(made_from, self._num_heads * spec.query_dim)
        heads = made_from.unflatten(-1, (self._num_heads, spec.query_dim))
        query = weights.key_up(heads, keep=spec.rope_dim)  # [n, heads, rank + rope_dim]
        changes = () if step.adapters is None else tuple(self._absorbed_deltas(step.adapters))
        for tokens, down, key_up, _ in changes:
            plain = heads[tokens, :, : spec.nope_dim]
            query[tokens, :, : spec.rank] += torch.einsum("nhp,rhp->nhr", plain, key_up) @ down
        do.latent_rope_store(
            query, latent, weights.norm, spec.eps, rotation, cache, step.slot_mapping
        )
        if self._temperature is not None:
            query *= query_factors(do, step.positions, self._temperature)
        attended = self._attention.forward(step.attention, self._layer, query, cache)
        values = weights.value_up(attended)  # [n, heads, value_dim]
        for tokens, down, _, value_up in changes:
            values[tokens] += torch.einsum("nhr,rhv->nhv", attended[tokens] @ down.T, value_up)
        values = values.flatten(1)
        return values if gate is None else do.apply_gate(values, gate, "sigmoid")

    def _absorbed_deltas(self, adapters: Adapters) -> Iterator[_AbsorbedDelta]:
        """Yield the adapters' deltas to K and V, for the tokens that have them.

        K and V are absorbed, so what would be added to each cached token's keys and values is
        instead added to the reading token's query and result: ``(K + B A)^T q = K^T q + A^T (B^T
        q)``.
        """
        latent = self._latent
        for tokens, down, up in adapters.deltas(self._up_name):
            heads = up.unflatten(1, (self._num_heads, -1))
            yield _AbsorbedDelta(
                tokens, down, *heads.split((latent.nope_dim, latent.value_dim), dim=2)
            )


def query_factors(
    operations: Operations, positions: torch.Tensor, spec: TemperatureSpec
) -> torch.Tensor:
    """Return the factors of queries at ``positions``: [n] int64 -> [n, 1, 1] float32."""
    return operations.attention_temperatures(
        positions, spec.position_offset, spec.floor_scale, spec.scale
    ).view(-1, 1, 1)


def query_row_order(spec: DecoderSpec, latent: LatentSpec) -> torch.Tensor | None:
    """Return the order of the query rows, [num_heads * query_outputs]: any gates come last; None:
    as loaded."""
    order = rotary_order(spec)
    if order is None and not latent.gates_output:
        return None
    heads = torch.arange(spec.num_heads * latent.query_outputs).view(spec.num_heads, -1)
    queries, gates = heads[:, : latent.query_dim], heads[:, latent.query_dim :]
    if order is not None:
        queries = _ordered(queries, latent, order)
    return torch.cat((queries.flatten(), gates.flatten()))


def _split_gates(made: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of each token's first ``size`` numbers, and the rest (strided)."""
    queries, gates = made[:, :size], made[:, size:]
    return queries.new_empty(queries.shape).copy_(queries), gates


def _ordered(heads: torch.Tensor, latent: LatentSpec, order: torch.Tensor) -> torch.Tensor:
    """Reorder each head's rotated dimensions in [num_heads, query_dim]."""
    return torch.cat((heads[:, : latent.nope_dim], heads[:, latent.nope_dim :][:, order]), dim=1)
