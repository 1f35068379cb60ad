"""The layers of an encoder-decoder model's decoder, over a step of sources and texts.

    source's tokens ──► keys, values ──► each layer's cache
    text's tokens ──► [ self-attention ─ cross-attention ─ MLP ] x layers ──► norm

A source's tokens cost one projection per layer: their place in the residual stream does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.models.block import Block
from engine.models.cross_attention import CrossAttention, of_text
from engine.models.embeddings import Embeddings
from engine.models.layer_state import LayerMemory
from engine.models.norms import Norm
from engine.models.source_spec import SourceSpec
from engine.models.step_state import StepState
from kernels.attention import LayerCache
from kernels.operations import Operations
from kernels.source import SourceState


class SourceLayerStack:
    """All layers in order.

    Args:
        source: of the model.
        embed: from tokens to the residual stream.
        blocks: self-attention and MLP of the layers.
        crossings: their attention to the source.
        last_norm: the final norm.
        operations: the kernels'.
    """

    def __init__(
        self,
        source: SourceSpec,
        embed: Embeddings,
        blocks: Sequence[Block],
        crossings: Sequence[CrossAttention],
        last_norm: Norm,
        operations: Operations,
    ) -> None:
        norms = (*(block.attention_norm for block in blocks[1:]), last_norm)
        self._layers = tuple(zip(blocks, crossings, norms, strict=True))
        self._source = source
        self._embed = embed
        self._operations = operations

    def __call__(
        self,
        input_ids: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerMemory],
        output_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the layers; see ``Decoder.forward``. Rows of a source's tokens are zeros."""
        plan = state.attention
        assert isinstance(plan, SourceState)
        self._store_sources(state, caches)
        indices = plan.text_indices
        if indices is not None:
            input_ids = input_ids.index_select(0, indices)
        normed = self._run(input_ids, of_text(state, indices), caches)
        if indices is not None:
            whole = normed.new_zeros((state.positions.shape[0], normed.shape[1]))
            normed = whole.index_copy_(0, indices, normed)
        return normed if output_indices is None else normed.index_select(0, output_indices)

    def _store_sources(self, state: StepState, caches: Sequence[LayerMemory]) -> None:
        sources = state.images
        if sources is None:
            return
        slots = state.slot_mapping.index_select(0, sources.token_indices)
        for (_, crossing, _), cache in zip(self._layers, caches, strict=True):
            assert isinstance(cache, LayerCache)
            crossing.store(sources.embeddings, slots, cache)

    def _run(
        self, input_ids: torch.Tensor, state: StepState, caches: Sequence[LayerMemory]
    ) -> torch.Tensor:
        """Run the text's tokens: [n] -> [n, hidden_size], of the final norm."""
        places = self._operations.places_behind(state.positions, self._source.num_places)
        x = self._embed(input_ids, places)
        if not len(x):
            return x
        normed = self._layers[0][0].attention_norm(x)
        for (block, crossing, next_norm), cache in zip(self._layers, caches, strict=True):
            assert isinstance(cache, LayerCache)
            out = block.output(block.attend(normed, state, cache), None)
            out = crossing(crossing.norm.add_norm(out, x), state, cache)
            out = block.mlp(block.mlp_norm.add_norm(out, x), None, x)
            normed = next_norm.add_norm(out, x)
        return normed
