"""Runs windows of tokens through a model one layer at a time, with the engine's own layers.

The engine's decoder is used rather than transformers' modules: it knows which layers share their
inputs and what produces them, can read one layer's weights alone, and is what will serve the
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from engine.kv_cache.storage import KVCache
from engine.models.block import Block, LayerStack
from engine.models.embeddings import Embeddings, Rotations, finish_logits
from engine.models.modules import Layer
from engine.models.norms import IdentityNorm, Norm, NormWeights, bind_norm
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from engine.runner.kernels import choose_kernels
from engine.runner.load_plan import attention_spec
from kernels.attention import BatchGeometry

_BLOCK_SIZE = 16
_BATCH_TOKENS = 4096
_CPU = torch.device("cpu")


class LayerRunner:
    """Layers of one model, over windows of one length.

    Args:
        spec: the model.
        window: tokens per window.
    """

    def __init__(self, spec: DecoderSpec, window: int) -> None:
        self._spec = spec
        self._window = window
        self._blocks = -(-window // _BLOCK_SIZE)  # cache blocks per window
        self._attention = attention_spec(spec, _BLOCK_SIZE, torch.float32, _CPU)
        self._kernels = choose_kernels("auto", self._attention)
        self._rotations = Rotations(spec, window, self._kernels.operations, _CPU)
        self.batch = max(1, _BATCH_TOKENS // window)  # windows that pass through a layer at once

    def embed(self, tokens: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Windows [n, window] int64 -> the residual stream, [n, window, hidden_size].

        Args:
            tokens: the windows.
            weights: the model's parameters, of which the embeddings are read.
        """
        table = weights["embedding"]

        def look_up(ids: torch.Tensor) -> torch.Tensor:
            return functional.embedding(ids, table)

        norm = self._norm(weights, "embedding_norm") if self._spec.embedding_norm else None
        learned = weights.get("positions")
        embeddings = Embeddings(self._spec, look_up, learned, norm, torch.float32)
        positions = torch.arange(self._window).repeat(tokens.shape[0])
        return embeddings(tokens.reshape(-1), positions).view(*tokens.shape, -1)

    def run(self, layer: Layer, index: int, x: torch.Tensor) -> torch.Tensor:
        """Run one layer: the residual stream [n, window, hidden_size] before it -> after it.

        Args:
            layer: its weights.
            index: its place in the model.
            x: overwritten.
        """
        spec = replace(self._spec, layers=(self._spec.layers[index],))
        walk = LayerStack(spec, [Block(spec, layer, self._kernels, 0)], IdentityNorm())
        rows = x.shape[0]
        cache = KVCache(spec, rows * self._blocks, _BLOCK_SIZE, torch.float32, _CPU)
        flat = walk(x.view(-1, x.shape[-1]), self._state(rows), cache.layers, None)
        return flat.view(x.shape)

    def losses(
        self, x: torch.Tensor, tokens: torch.Tensor, weights: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The loss of each next token: ``-log p``, [n, window - 1] float32.

        Args:
            x: [n, window, hidden_size], after the last layer.
            tokens: [n, window] int64.
            weights: the model's parameters, of which the last norm and the head are read.
        """
        spec, operations = self._spec, self._kernels.operations
        last = self._norm(weights, "norm")
        head = weights["embedding" if spec.tie_word_embeddings else "head"]
        losses = []
        for stream, ids in zip(x, tokens, strict=True):
            said = functional.linear(last(stream[:-1].contiguous()), head, weights.get("head.bias"))
            logits = finish_logits(spec, said, operations)
            losses.append(functional.cross_entropy(logits, ids[1:], reduction="none"))
        return torch.stack(losses)

    def _norm(self, weights: Mapping[str, torch.Tensor], name: str) -> Norm:
        norm = self._spec.norm
        own = NormWeights(weights[name] + norm.offset_of(name), weights.get(f"{name}.bias"))
        return bind_norm(norm, own, self._kernels.operations)

    def _state(self, rows: int) -> StepState:
        window, blocks = self._window, self._blocks
        geometry = BatchGeometry.of(
            np.arange(rows + 1) * window,
            np.full(rows, window),
            np.arange(rows * blocks).reshape(rows, blocks),
            _CPU,
        )
        positions = torch.arange(window).repeat(rows)
        first = torch.arange(rows).repeat_interleave(window) * (blocks * _BLOCK_SIZE)
        return StepState(
            attention=self._kernels.attention.plan(geometry, self._attention),
            slot_mapping=first + positions,
            positions=positions,
            rotations=self._rotations(positions),
        )
