"""The decoder: one for all families, made from a spec and its weights.

    embedding ─► norm ─► [ attention ─ + ─ norm ─ gated MLP ─ + ─ norm ] x layers ─► logits

The sum and the norm behind it are one operation, so a layer ends with the norm of the next one.
Nothing of a step is kept here: what a forward pass needs comes in its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.models.modules import Layer, Modules
from engine.models.rope import inverse_frequencies
from engine.models.spec import DecoderSpec
from kernels.attention import LayerCache
from kernels.operations import Kernels


@dataclass(frozen=True, slots=True)
class StepState:
    """What the layers of one step share."""

    attention: Any  # the backend's plan
    slot_mapping: torch.Tensor  # [num_tokens] int64: where each token's keys and values go
    rotation: tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the tokens' positions


class Decoder:
    """A loaded model.

    Args:
        spec: what it is.
        modules: its parameters, all on one device.
        kernels: what computes attention and all that is no matrix product.
        max_model_len: longest context served, in tokens.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        modules: Modules,
        kernels: Kernels,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self._attention, self._operations = kernels
        self._modules = modules
        # The norm behind each layer: the next layer's, and after the last the model's own.
        norms = (*(layer.attention_norm for layer in modules.layers[1:]), modules.norm)
        self._layers = tuple(zip(modules.layers, norms, strict=True))
        frequencies, self._rope_scale = inverse_frequencies(
            spec.rope, spec.head_dim, spec.max_position_embeddings, max_model_len
        )
        self._frequencies = frequencies.to(modules.norm.device)

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a step's positions, for its ``StepState``."""
        return self._operations.rope_tables(positions, self._frequencies, self._rope_scale)

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
            [num_wanted or num_tokens, hidden_size], ready for ``logits``.
        """
        do, eps = self._operations, self.spec.norm_eps
        residual = self._modules.embed(input_ids)
        normed = do.rms_norm(residual, self._modules.layers[0].attention_norm, eps)
        last = self._modules.layers[-1]
        for (layer, next_norm), cache in zip(self._layers, caches, strict=True):
            attended = self._attend(layer, normed, state, cache)
            if layer is last and wanted is not None:
                # Once the last keys and values are stored, no token needs the others' results.
                residual = residual.index_select(0, wanted)
                attended = attended.index_select(0, wanted)
            normed = do.add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps)
            inner = do.silu_mul(layer.gate_up(normed))
            normed = do.add_rms_norm(layer.down(inner), residual, next_norm, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: [rows, hidden_size] -> [rows, vocab_size] float32."""
        return self._modules.head(hidden).float()

    def _attend(
        self, layer: Layer, normed: torch.Tensor, state: StepState, cache: LayerCache
    ) -> torch.Tensor:
        """Store keys and values; [num_tokens, hidden_size] -> [num_tokens, query_size]."""
        spec = self.spec
        query = self._operations.norm_rope_store(
            layer.qkv(normed).view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim),
            layer.qk_norm,
            spec.norm_eps,
            state.rotation if layer.has_rope else None,
            cache,
            state.slot_mapping,
        )
        attended = self._attention.forward(state.attention, layer.attention, query, cache)
        return attended.view(-1, spec.query_size)
