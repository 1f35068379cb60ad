"""The decoder: one implementation for all families, made from a spec and weights.

    embedding ─► [ attention ─ MLP ] x layers ─► norm ─► logits

``block.py`` has the layers and the loops over them. Decoders are stateless: everything that a
forward pass needs is in its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.models.altup import AltUpLayerStack
from engine.models.block import AuxHiddenStates, Block, LayerStack
from engine.models.cross_attention import CrossAttention
from engine.models.embeddings import Embeddings, Rotations, finish_logits
from engine.models.layer_state import LayerMemory
from engine.models.linear import GreedyHead
from engine.models.modules import Modules
from engine.models.norms import IdentityNorm, Norm, bind_norm
from engine.models.peers import Peers
from engine.models.per_layer import PerLayerEmbeddings
from engine.models.source_stack import SourceLayerStack
from engine.models.spec import DecoderSpec
from engine.models.step_state import Rotation, StepState
from kernels.operations import Kernels
from kernels.sampling import SamplerOutput

__all__ = ["Decoder", "StepState"]


class Decoder:
    """A loaded model, or a pipeline stage of one.

    Args:
        spec: of the model.
        modules: its parameters, all on one device.
        kernels: compute the attention and everything that is not a matrix product.
        max_model_len: longest context served, in tokens.
        peers: the ranks with the other shards of the model; None: it is not sharded.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        modules: Modules,
        kernels: Kernels,
        max_model_len: int,
        peers: Peers | None = None,
    ) -> None:
        self.spec = spec
        self._modules = modules
        self._operations = kernels.operations
        like = modules.sample_parameter
        self.dtype = like.dtype  # of hidden states
        self._embed: Embeddings | None = None
        if modules.embed is not None:
            norm: Norm | None = None
            if modules.embedding_norm is not None:
                norm = bind_norm(spec.norm, modules.embedding_norm, kernels.operations)
            self._embed = Embeddings(spec, modules.embed, modules.positions, norm, like.dtype)
        self._per_layer: PerLayerEmbeddings | None = None
        if modules.per_layer is not None:
            self._per_layer = PerLayerEmbeddings(spec, modules.per_layer, kernels.operations)
        blocks = [
            Block(spec, layer, kernels, i, peers)
            for i, layer in enumerate(modules.layers, spec.first_layer)
        ]
        mixtures = (block.moe for block in blocks)
        # One mixture of experts of each form.
        self.moe_layers = tuple({m.kernel_key: m for m in mixtures if m is not None}.values())
        last_norm: Norm = IdentityNorm()  # in a stage before the last
        if modules.norm is not None:
            last_norm = bind_norm(spec.norm, modules.norm, kernels.operations)
        self._layers: LayerStack | AltUpLayerStack
        if modules.altup is not None:
            layers = [layer.altup for layer in modules.layers if layer.altup is not None]
            self._layers = AltUpLayerStack(
                *(spec, blocks, layers, modules.altup, last_norm, kernels.operations)
            )
        else:
            self._layers = LayerStack(spec, blocks, last_norm)
        self._source_layers: SourceLayerStack | None = None
        if spec.source is not None and self._embed is not None:
            weights = [layer.cross_attention for layer in modules.layers]
            crossings = [CrossAttention(spec, each, kernels) for each in weights if each]
            self._source_layers = SourceLayerStack(
                *(spec.source, self._embed, blocks, crossings, last_norm, kernels.operations)
            )
        self._rotations = Rotations(spec, max_model_len, kernels.operations, like.device)

    def rotations(self, positions: torch.Tensor) -> tuple[Rotation, ...]:
        """Return the cosines and sines of a step's positions, for its ``StepState``."""
        return self._rotations(positions)

    def forward(
        self,
        input_ids: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerMemory],
        output_indices: torch.Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> torch.Tensor:
        """Run the layers, and store the tokens' keys and values.

        Args:
            input_ids: [num_tokens] int64, the step's rows concatenated.
            state: the step's.
            caches: one for each layer, updated in place.
            output_indices: [num_wanted] int64, the tokens whose result is read; None: all of them.
            aux_states: record the inputs of layers.

        Returns:
            [num_wanted or num_tokens, hidden_size], the input of ``logits``; in a stage before the
                last, the input of ``forward_hidden``.
        """
        assert self._embed is not None, "a stage behind the first was asked for embeddings"
        if self._source_layers is not None:
            return self._source_layers(input_ids, state, caches, output_indices)
        x = self._embed(input_ids, state.positions)
        if state.images is not None:
            x.index_copy_(0, state.images.token_indices, state.images.embeddings)
        if self._per_layer is not None:
            embedded = input_ids
            if state.images is not None:
                pad_id = self.spec.per_layer_pad_id
                embedded = input_ids.index_fill(0, state.images.token_indices, pad_id)
            state = replace(state, per_layer=self._per_layer(embedded, x))
        return self._with_per_layer_inputs(
            self._layers(x, state, caches, output_indices, aux_states), state
        )

    def forward_hidden(
        self,
        x: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerMemory],
        output_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers of a stage after the first, on the previous stage's result.

        Args:
            x: [num_tokens, stage_input_size], the residual stream and the per-layer embeddings of
                the layers from here on; overwritten.
            state, caches, output_indices: see ``forward``.

        Returns:
            The same for the next stage; in the last stage, the input of ``logits``.
        """
        spec = self.spec
        if spec.per_layer_size:
            x, parts = x.split((spec.hidden_size, spec.stage_input_size - spec.hidden_size), dim=1)
            x, shape = x.contiguous(), (spec.num_remaining_layers, spec.per_layer_size)
            state = replace(state, per_layer=parts.unflatten(1, shape))
        return self._with_per_layer_inputs(self._layers(x, state, caches, output_indices), state)

    def _with_per_layer_inputs(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        """Append the per-layer embeddings of the later stages' layers to the residual stream."""
        if state.per_layer is None or self.spec.has_final_norm:
            return x
        behind = state.per_layer[:, self.spec.num_layers :].flatten(1)
        return torch.cat((x, behind), dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the head's output in float32.

        [rows, hidden_size] -> [rows, vocab_size], the scores of the next token, or [rows,
        num_labels] for a classifier.
        """
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, but in the model's dtype if they are rounded to it anyway."""
        assert self._modules.head is not None, "a model without a head was asked for scores"
        return finish_logits(self.spec, self._modules.head.logits(hidden), self._operations)

    def sample_greedy(self, hidden: torch.Tensor) -> SamplerOutput | None:
        """Return the tokens with the largest logits, [rows, hidden_size] -> [rows].

        None if this would be no less work than computing all logits.
        """
        head, spec = self._modules.head, self.spec
        if not spec.is_generative or spec.logit_scale <= 0 or not isinstance(head, GreedyHead):
            return None
        return head.sample_greedy(hidden, spec.logit_scale, spec.logit_softcap)
