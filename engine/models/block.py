"""A decoder layer's computation, and the loops over all layers.

A walk runs all layers of a step. It holds the residual stream ``x`` and knows where the norms are;
how tokens are mixed and what the MLP is belongs to the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from engine.models.adapters import Adapters, project
from engine.models.attention import Attention
from engine.models.experts import Experts, ExpertsAlongside, bind_mlp
from engine.models.layer_state import HybridMemory, LayerMemory
from engine.models.linear import Linear
from engine.models.mlp import bind_activation
from engine.models.modules import AttentionWeights, Layer
from engine.models.norms import IdentityNorm, Norm, NormWeights, bind_norm
from engine.models.peers import Peers
from engine.models.per_layer import PerLayerInput
from engine.models.recurrent import bind_recurrent
from engine.models.small_batch import SmallBatchLayer
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from kernels.operations import Kernels


class Mixer(Protocol):
    """The part of a layer that mixes tokens: attention, or a recurrence in its place."""

    @property
    def output(self) -> Linear:
        """Its output projection, to hidden_size."""
        ...

    @property
    def output_name(self) -> str:
        """The parameter name of that projection."""
        ...

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, inputs of ``output``]; updates ``cache``."""
        ...


class HybridMixer:
    """Attention and a recurrence on the same norm, whose projections are summed (Falcon-H1, Zuo et
    al. 2025).

    Args:
        attention, recurrence: the two mixers.
        attended_size: inputs of attention's output projection.
    """

    def __init__(self, attention: Mixer, recurrence: Mixer, attended_size: int) -> None:
        self._attention, self._recurrence = attention, recurrence
        self._attended_size = attended_size

    def __call__(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, inputs of both output projections]."""
        assert isinstance(cache, HybridMemory)
        attended = self._attention(read, state, cache.blocks)
        recurred = self._recurrence(read, state, cache.state)
        return torch.cat((attended, recurred.view(len(read), -1)), dim=1)

    def project(self, mixed: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
        """Project and add both results for some tokens -> [n, hidden_size]."""
        first, second = self._attention, self._recurrence
        attended = mixed[:, : self._attended_size].contiguous()
        recurred = mixed[:, self._attended_size :].contiguous()
        out = project(first.output, attended, adapters, first.output_name)
        out += project(second.output, recurred, adapters, second.output_name)
        return out


class AuxHiddenStates:
    """Copies of the residual stream as it enters some layers, concatenated for each token.

    Args:
        layers: their numbers, in order.
    """

    __slots__ = ("_places", "states")

    def __init__(self, layers: Sequence[int]) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self.states: torch.Tensor | None = None  # [num_tokens, len(layers) * hidden_size]

    def capture(self, layer: int, x: torch.Tensor) -> None:
        """Copy ``x`` [num_tokens, hidden_size] before it enters a layer, if that is tapped."""
        place = self._places.get(layer)
        if place is None:
            return
        count, size = x.shape
        if self.states is None:
            self.states = x.new_empty((count, len(self._places) * size))
        self.states[:, place * size : (place + 1) * size].copy_(x)


class Block:
    """A layer's attention and MLP, each from its input to what is added to ``x``.

    Args:
        spec: of the model, or of this rank's shard.
        layer: its parameters.
        kernels: compute the attention and everything that is not a matrix product.
        index: the layer's number.
        peers: the ranks with the other shards; None: there are none.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: Layer,
        kernels: Kernels,
        index: int,
        peers: Peers | None = None,
    ) -> None:
        operations = kernels.operations
        self._mixer: Mixer
        if isinstance(layer.mixer, AttentionWeights):
            self._mixer = Attention(spec, layer.mixer, kernels, index, peers)
        else:
            self._mixer = bind_recurrent(spec, layer.mixer, operations, index, peers)
        self._hybrid: HybridMixer | None = None
        if layer.recurrence is not None:
            recurrence = bind_recurrent(spec, layer.recurrence, operations, index, peers)
            self._hybrid = HybridMixer(self._mixer, recurrence, spec.attention_output_size)
        self._feed_forward = (
            None if layer.mlp is None else bind_mlp(spec, layer.mlp, operations, index)
        )
        self.has_mlp = layer.mlp is not None
        self._experts_alongside: ExpertsAlongside | None = None
        if layer.experts_alongside is not None:
            self._experts_alongside = ExpertsAlongside(
                spec, layer.experts_alongside, operations, index, peers
            )
        self._experts_aside: Experts | None = None
        if layer.experts_aside is not None and spec.moe is not None:
            activate = bind_activation(spec, operations)
            self._experts_aside = Experts(
                spec.moe, layer.experts_aside, activate, operations, index
            )
        self._per_layer_input: PerLayerInput | None = None
        if layer.per_layer_input is not None:
            self._per_layer_input = PerLayerInput(spec, layer.per_layer_input, operations)
        self._stream_scale = layer.scale
        # Whether nothing follows the addition of the MLP's output.
        self.ends_with_mlp = self._per_layer_input is None and layer.scale == 1.0
        self._scale = spec.residual_scale

        def norm(weights: NormWeights | None, eps: float | None = None) -> Norm | None:
            own = spec.norm if eps is None else replace(spec.norm, eps=eps)
            return None if weights is None else bind_norm(own, weights, operations)

        self.attention_norm: Norm = norm(layer.attention_norm) or IdentityNorm()
        self.mlp_norm: Norm = norm(layer.mlp_norm) or IdentityNorm()
        self._post_attention_norm = norm(layer.post_attention_norm, spec.norm.output_eps)
        self._post_mlp_norm = norm(layer.post_mlp_norm, spec.norm.output_eps)
        self._peers = peers
        # The layer's form for steps of few tokens, if it has one.
        has_few = peers is None and self._hybrid is None
        has_few &= not any(each.experts_aside for each in spec.layers)
        self.small_batch = (
            SmallBatchLayer.build(spec, layer, self._mixer, operations) if has_few else None
        )

    def attend(self, read: torch.Tensor, state: StepState, cache: LayerMemory) -> torch.Tensor:
        """Return the input of ``output``, for all tokens; see ``Mixer``."""
        if self._hybrid is not None:
            return self._hybrid(read, state, cache)
        return self._mixer(read, state, cache)

    def output(self, attended: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
        """Project the mixer's result for some tokens -> [n, hidden_size], to be added."""
        if self._hybrid is not None:
            out = self._hybrid.project(attended, adapters)
        else:
            out = project(self._mixer.output, attended, adapters, self._mixer.output_name)
        return self._finish(self._sum(out), self._post_attention_norm)

    def mlp(
        self,
        read: torch.Tensor,
        adapters: Adapters | None,
        stream: torch.Tensor,
        aside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[n, hidden_size] -> [n, hidden_size], to be added; ``read`` is the norm of ``stream``.

        ``aside`` is the result of the previous layer's ``mix_aside``.
        """
        assert self._feed_forward is not None, "a layer that ends with its mixer"
        out = self._feed_forward(read, adapters)
        if aside is not None:
            out += aside
        out = (
            self._sum(out)
            if self._experts_alongside is None
            else self._experts_alongside(out, stream)
        )
        return self._finish(out, self._post_mlp_norm)

    def mix_aside(self, read: torch.Tensor, adapters: Adapters | None) -> torch.Tensor | None:
        """Return what the next layer's ``mlp`` adds, made of what this one's reads: [n,
        hidden_size] -> the same, not yet summed over ranks; None: there is nothing."""
        return None if self._experts_aside is None else self._experts_aside(read, adapters)

    @property
    def moe(self) -> Experts | None:
        """Its mixture of experts, if it has one."""
        if self._experts_aside is not None:
            return self._experts_aside
        if self._experts_alongside is not None:
            return self._experts_alongside.experts
        return self._feed_forward if isinstance(self._feed_forward, Experts) else None

    def finish_layer(self, x: torch.Tensor, per_layer_input: torch.Tensor | None) -> torch.Tensor:
        """Finish the layer after the MLP: update the residual stream [n, hidden_size] in place.

        ``part`` [n, per_layer_size] is this layer's part of the per-layer embeddings.
        """
        if self._per_layer_input is not None:
            assert per_layer_input is not None
            x += self._per_layer_input(x, per_layer_input)
        return x if self._stream_scale == 1.0 else x.mul_(self._stream_scale)

    def per_layer_addend(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return what its part [n, per_layer_size] of the per-layer embeddings adds, given the
        stream [n, hidden_size] -> the same."""
        assert self._per_layer_input is not None
        return self._per_layer_input(x, part)

    def _sum(self, out: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks."""
        return out if self._peers is None else self._peers.all_reduce(out)

    def _finish(self, out: torch.Tensor, after: Norm | None) -> torch.Tensor:
        if after is not None:
            out = after(out)
        return out if self._scale == 1.0 else out.mul_(self._scale)


class _LayerInputs(NamedTuple):
    """The inputs of a walk beside the residual stream."""

    state: StepState
    caches: Sequence[LayerMemory]  # one for each layer, updated in place
    output_indices: torch.Tensor | None  # [num_wanted] int64, the tokens whose result is read
    aux_states: AuxHiddenStates | None


class LayerStack:
    """All layers in order.

    Args:
        spec: of the model.
        blocks: its layers.
        last_norm: the final norm.
    """

    def __init__(self, spec: DecoderSpec, blocks: Sequence[Block], last_norm: Norm) -> None:
        # The norm after each layer: the next layer's, and after the last one the final norm.
        norms = (*(block.attention_norm for block in blocks[1:]), last_norm)
        self._blocks = tuple(zip(blocks, norms, strict=True))
        self._first_norm = blocks[0].attention_norm
        self._last = blocks[-1]
        self._shares_norm = spec.shared_norm
        self._is_parallel = spec.placement == "parallel"
        self._small_batch_layers = [
            block.small_batch for block in blocks if block.small_batch is not None
        ]
        if len(self._small_batch_layers) < len(blocks):
            self._small_batch_layers = []  # all layers or none

    def __call__(
        self,
        x: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerMemory],
        output_indices: torch.Tensor | None,
        aux_states: AuxHiddenStates | None = None,
    ) -> torch.Tensor:
        """Run the layers and return the final norm of the residual stream, for ``wanted`` or all
        tokens.

        Args:
            x: [num_tokens, hidden_size], overwritten.
            state: the step's.
            caches: one for each layer, updated in place.
            output_indices: [num_wanted] int64; None: all tokens.
            aux_states: record the inputs of layers.

        Returns:
            [num_wanted or num_tokens, hidden_size].
        """
        small = self._small_batch_layers
        if small and all(layer.supports(x, state) for layer in small):
            return self._run_small_batch(x, _LayerInputs(state, caches, output_indices, aux_states))
        # Not bound in __init__: a reference cycle would delay freeing the layers.
        go = self._run_parallel if self._is_parallel else self._run_sequential
        return go(x, _LayerInputs(state, caches, output_indices, aux_states))

    def _run_sequential(self, x: torch.Tensor, given: _LayerInputs) -> torch.Tensor:
        """Run attention, then the MLP. Norms that a placement lacks are identities."""
        state, caches, wanted, taps = given
        adapters, images = state.adapters, state.images
        # A sum and the norm after it are one operation: each layer ends with the next one's norm.
        normed = self._first_norm(x)
        held: torch.Tensor | None = None  # of the layer before, added after this one
        for i, ((block, next_norm), cache) in enumerate(zip(self._blocks, caches, strict=True)):
            if taps is not None:
                taps.capture(i, x)
            attended = block.attend(normed, state, cache)
            if block is self._last and wanted is not None:
                adapters = state.output_adapters
                x, attended = _select(wanted, x, attended)
                if held is not None:
                    (held,) = _select(wanted, held)
                if block.small_batch is not None and block.small_batch.supports(x, state):
                    block.small_batch.finish(x, attended)
                    return next_norm(x)
            out = block.output(attended, adapters)
            if block.has_mlp:
                read, added = block.mlp_norm.add_norm(out, x), held
                held = block.mix_aside(read, adapters)
                out = block.mlp(read, adapters, x, added)
            if images is not None and i < len(images.deepstack):
                x += out
                x.index_add_(0, images.token_indices, images.deepstack[i])
                normed = next_norm(x)
                continue
            if block.ends_with_mlp:
                normed = next_norm.add_norm(out, x)
                continue
            part = None if state.per_layer is None else state.per_layer[:, i]
            if part is not None and block is self._last and wanted is not None:
                (part,) = _select(wanted, part)
            x += out
            normed = next_norm(block.finish_layer(x, part))
        return normed

    def _run_small_batch(self, x: torch.Tensor, given: _LayerInputs) -> torch.Tensor:
        """Run layers that add to the residual stream themselves; see ``small_batch.py``."""
        state, caches, wanted, taps = given
        for i, (layer, cache) in enumerate(zip(self._small_batch_layers, caches, strict=True)):
            if taps is not None:
                taps.capture(i, x)
            layer(x, state, cache)
        if wanted is not None:
            (x,) = _select(wanted, x)
        _, last_norm = self._blocks[-1]
        return last_norm(x)

    def _run_parallel(self, x: torch.Tensor, given: _LayerInputs) -> torch.Tensor:
        """Run attention and MLP on the same residual stream."""
        state, caches, wanted, taps = given
        adapters = state.adapters
        normed = self._first_norm(x)
        for i, ((block, next_norm), cache) in enumerate(zip(self._blocks, caches, strict=True)):
            if taps is not None:
                taps.capture(i, x)
            attended = block.attend(normed, state, cache)
            read = normed if self._shares_norm else block.mlp_norm(x)
            if block is self._last and wanted is not None:
                adapters = state.output_adapters
                x, attended, read = _select(wanted, x, attended, read)
            out = block.output(attended, adapters)
            out += block.mlp(read, adapters, x)
            normed = next_norm.add_norm(out, x)
        return normed


def _select(output_indices: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Keep the wanted tokens; after the last layer's attention no others are needed."""
    return [tensor.index_select(0, output_indices) for tensor in tensors]
