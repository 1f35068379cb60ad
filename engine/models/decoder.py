"""The decoder: one for all families, made from a spec and its weights.

    embedding ─► [ norm ─ attention ─ + ─ norm ─ gated MLP ─ + ] x layers ─► norm ─► logits

Nothing of a step is kept here: what a forward pass needs comes in its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from engine.models.linear import Linear, LinearMethod
from engine.models.loader import Weights
from engine.models.rope import inverse_frequencies
from engine.models.spec import DecoderSpec
from kernels.attention import AttentionBackend, LayerAttention, LayerCache
from kernels.reference.kv_store import store_kv
from kernels.reference.layers import rms_norm, rope, rope_tables, silu_mul


@dataclass(frozen=True, slots=True)
class StepState:
    """What the layers of one step share."""

    attention: Any  # the backend's plan
    cache_rows: torch.Tensor  # where this step's keys and values go (kernels.reference.kv_store)
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: LayerAttention
    has_rope: bool
    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A loaded model.

    Args:
        spec: what it is.
        weights: its parameters (``engine.models.weights``), all on one device.
        method: how its linear layers are held.
        backend: how attention is computed.
        max_model_len: longest context served, in tokens.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        method: LinearMethod,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self._backend = backend
        self._embedding = weights["embedding"]
        self._norm = weights["norm"]
        self._head = method.make(weights.get("head", self._embedding), None)
        self._layers = [_make_layer(spec, weights, method, i) for i in range(spec.num_layers)]
        frequencies, self._rope_scale = inverse_frequencies(
            spec.rope, spec.head_dim, spec.max_position_embeddings, max_model_len
        )
        self._frequencies = frequencies.to(self._embedding.device)

    def rope_tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a step's positions, for its ``StepState``."""
        return rope_tables(positions, self._frequencies, self._rope_scale)

    def forward(
        self,
        input_ids: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerCache],
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers, and store the tokens' keys and values.

        Args:
            input_ids: [num_tokens] int64, the rows of the step one after the other.
            state: the step's.
            caches: one for each layer, written in place.
            wanted: [num_wanted] int64, the tokens whose result is read; None for all of them.

        Returns:
            [num_wanted or num_tokens, hidden_size], before the final norm.
        """
        hidden = functional.embedding(input_ids, self._embedding)
        eps = self.spec.norm_eps
        last = self._layers[-1]
        for layer, cache in zip(self._layers, caches, strict=True):
            normed = rms_norm(hidden, layer.attention_norm, eps)
            attended = self._attend(layer, normed, state, cache)
            if layer is last and wanted is not None:
                # Once the last keys and values are stored, no token needs the others' results.
                hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
            hidden = hidden + layer.output(attended)
            normed = rms_norm(hidden, layer.mlp_norm, eps)
            hidden = hidden + layer.down(silu_mul(layer.gate_up(normed)))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [rows, hidden_size] -> [rows, vocab_size] float32."""
        return self._head(rms_norm(hidden, self._norm, self.spec.norm_eps)).float()

    def _attend(
        self, layer: _Layer, normed: torch.Tensor, state: StepState, cache: LayerCache
    ) -> torch.Tensor:
        """Store keys and values; [num_tokens, hidden_size] -> [num_tokens, query_size]."""
        spec = self.spec
        heads = spec.num_heads + spec.num_kv_heads
        fused = layer.qkv(normed).view(-1, heads + spec.num_kv_heads, spec.head_dim)
        # Queries and keys lie side by side and are turned together.
        query_key, values = fused[:, :heads], fused[:, heads:]
        if layer.qk_norm is not None:
            query_key = rms_norm(query_key, layer.qk_norm, spec.norm_eps)
        if layer.has_rope:
            query_key = rope(query_key, state.cos, state.sin)
        store_kv(query_key[:, spec.num_heads :], values, cache, state.cache_rows)
        query = query_key[:, : spec.num_heads]
        attended = self._backend.forward(state.attention, layer.attention, query, cache)
        return attended.reshape(-1, spec.query_size)


def _make_layer(spec: DecoderSpec, weights: Weights, method: LinearMethod, i: int) -> _Layer:
    def linear(name: str) -> Linear:
        return method.make(weights[f"{i}.{name}.weight"], weights.get(f"{i}.{name}.bias"))

    qk_norm = None
    if spec.qk_norm:
        query_norm = weights[f"{i}.query_norm"].expand(spec.num_heads, -1)
        key_norm = weights[f"{i}.key_norm"].expand(spec.num_kv_heads, -1)
        qk_norm = torch.cat((query_norm, key_norm))
    return _Layer(
        attention=LayerAttention(
            spec.attention_scale, spec.layers[i].window, spec.attention_softcap
        ),
        has_rope=spec.layers[i].rope,
        attention_norm=weights[f"{i}.attention_norm"],
        qkv=linear("qkv"),
        qk_norm=qk_norm,
        output=linear("output"),
        mlp_norm=weights[f"{i}.mlp_norm"],
        gate_up=linear("gate_up"),
        down=linear("down"),
    )
