"""A layer's attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.models.adapters import project
from engine.models.latent import LatentAttention, query_factors
from engine.models.layer_state import LayerMemory
from engine.models.modules import AttentionWeights
from engine.models.norms import NormWeights, ShardedRmsNorm, bind_norm
from engine.models.peers import Peers
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from kernels.attention import (
    KVHeadSpec,
    LayerCache,
    SelectionSpec,
)
from kernels.operations import Kernels


class Attention:
    """Stores keys and values, and attends; see ``engine.models.block.Mixer``.

    Args:
        spec: of the model, or of this rank's shard.
        weights: the layer's.
        kernels: compute the attention and everything that is not a matrix product.
        index: the layer's number.
        peers: the ranks with the other shards; None: there are none.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: AttentionWeights,
        kernels: Kernels,
        index: int,
        peers: Peers | None = None,
    ) -> None:
        spec = spec.for_layer(spec.layers[index - spec.first_layer])
        self._spec = spec
        self._weights = weights
        self._qkv_name = f"{index}.qkv.weight"
        self.output, self.output_name = weights.output, f"{index}.output.weight"
        tuned = spec.temperature
        self._has_temperature = tuned is not None and (weights.rope is None or tuned.with_rope)
        self._attention, self._operations = kernels
        self._num_heads = spec.num_heads + 2 * spec.num_kv_heads

        def wide_norm(norm: NormWeights | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
            if norm is None:
                return None
            if peers is None:
                return bind_norm(spec.norm, norm, kernels.operations)
            return ShardedRmsNorm(norm.weight, spec.norm.eps, peers)

        self._query_norm = wide_norm(weights.wide_query_norm)
        self._key_norm = wide_norm(weights.wide_key_norm)
        # The kernels' layer norm has one weight for all rows; those of the heads come after it.
        layer_norm = weights.qk_layer_norm
        self._unit = None if layer_norm is None else torch.ones_like(layer_norm[0])
        self._latent = None
        if weights.latent is not None and spec.latent is not None:
            self._latent = LatentAttention(
                spec, spec.latent, weights.latent, weights.attention, kernels, index
            )

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """See ``Mixer``."""
        fused = project(self._weights.qkv, read, state.adapters, self._qkv_name)
        return self.attend(fused, state, cache, read)

    def attend(
        self,
        fused: torch.Tensor,
        state: StepState,
        cache: LayerMemory,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do the same from the output of ``qkv`` on, [num_tokens, outputs], which may be
        overwritten. Only an indexer needs what was ``read``."""
        assert isinstance(cache, LayerCache)
        spec, weights = self._spec, self._weights
        gate: torch.Tensor | None = None
        if spec.gate_size:
            gate, fused = _split_gate(fused, spec.gate_size)
        if self._latent is not None:
            assert weights.rope is not None
            rotation = state.rotations[weights.rope]
            attended = self._latent(fused, state, rotation, cache, read)
            return attended if gate is None else self._apply_gate(attended, gate)
        if spec.qkv_clip is not None:
            fused.clamp_(-spec.qkv_clip, spec.qkv_clip)
        if spec.uses_shared_kv:
            return self._attend_shared_kv(fused, state, cache)
        if self._query_norm is not None:
            fused = self._norm_query_key(fused)
        if weights.qk_layer_norm is not None:
            self._norm_heads(fused, weights.qk_layer_norm)
        if weights.value_norm is not None:
            self._norm_values(fused, weights.value_norm)
        query = self._operations.norm_rope_store(
            fused.view(-1, self._num_heads, spec.head_dim),
            weights.qk_norm,
            spec.norm.eps,
            None if weights.rope is None else state.rotations[weights.rope],
            cache,
            state.slot_mapping,
        )
        if weights.query_scale is not None:
            query *= weights.query_scale
        if self._has_temperature:
            assert spec.temperature is not None
            query *= query_factors(self._operations, state.positions, spec.temperature)
        attended = self._attention.forward(state.attention, weights.attention, query, cache)
        if spec.value_head_dim is not None:
            attended = attended[..., : spec.value_head_dim] * spec.value_scale
        attended = attended.view(-1, spec.attention_output_size)
        return attended if gate is None else self._apply_gate(attended, gate)

    def _apply_gate(self, attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Scale [num_tokens, attention_output_size] by the activation of its gates."""
        kind = self._spec.gate_kind
        if not self._spec.gates_by_head:
            return self._operations.apply_gate(attended, gate, kind)
        heads = attended.view(gate.numel(), -1)
        gated = self._operations.apply_gate(heads, gate.contiguous().view(-1, 1), kind)
        return gated.view(attended.shape)

    def _attend_shared_kv(
        self, fused: torch.Tensor, state: StepState, cache: LayerCache
    ) -> torch.Tensor:
        """Attend to the keys and values of another layer, which this step has already stored."""
        spec, weights = self._spec, self._weights
        query = self._operations.norm_rope(
            fused.view(-1, spec.num_heads, spec.head_dim),
            weights.qk_norm,
            spec.norm.eps,
            None if weights.rope is None else state.rotations[weights.rope],
        )
        attended = self._attention.forward(state.attention, weights.attention, query, cache)
        return attended.view(-1, spec.query_size)

    def _norm_heads(self, fused: torch.Tensor, weight: torch.Tensor) -> None:
        """Apply a layer norm to each head's query and key, in place.

        fused: [num_tokens, outputs]; weight: [num_heads + num_kv_heads, head_dim].
        """
        assert self._unit is not None
        heads = fused[:, : weight.numel()].unflatten(1, weight.shape)
        rows = heads.contiguous().view(-1, weight.shape[1])
        normed = self._operations.layer_norm(rows, self._unit, None, self._spec.norm.eps)
        heads.copy_(normed.view(heads.shape).mul_(weight))

    def _norm_values(self, fused: torch.Tensor, norm: torch.Tensor) -> None:
        """Norm each head's value, in place."""
        spec = self._spec
        values = fused[:, -spec.kv_size :]
        heads = values.contiguous().view(-1, spec.head_dim)
        normed = self._operations.rms_norm(heads, norm, spec.norm.eps)
        values.copy_(normed.view(values.shape))

    def _norm_query_key(self, fused: torch.Tensor) -> torch.Tensor:
        assert self._query_norm is not None
        assert self._key_norm is not None
        sizes = (self._spec.query_size, self._spec.kv_size, self._spec.kv_size)
        query, key, value = fused.split(sizes, dim=-1)
        query, key = self._query_norm(query.contiguous()), self._key_norm(key.contiguous())
        return torch.cat((query, key, value), dim=-1)


def other_heads(spec: DecoderSpec) -> tuple[KVHeadSpec, ...]:
    """Return the layers' heads that differ from the model's, for an ``AttentionSpec``."""
    kinds = dict.fromkeys(layer.heads for layer in spec.layers if layer.heads is not None)
    return tuple(
        KVHeadSpec(
            heads.num_kv_heads,
            heads.head_dim,
            spec.windows_of(heads),
            heads.num_heads or spec.num_heads,
        )
        for heads in kinds
    )


def selection(spec: DecoderSpec) -> SelectionSpec | None:
    """Return how queries select positions, for an ``AttentionSpec``; None: they do not."""
    indexer = None if spec.latent is None else spec.latent.indexer
    if indexer is None:
        return None
    return SelectionSpec(indexer.top_k, indexer.num_heads, indexer.head_dim)


def _split_gate(fused: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a fused projection into its gates (strided) and a copy of the rest."""
    gate, rest = fused[:, :size], fused[:, size:]
    return gate, rest.new_empty(rest.shape).copy_(rest)
