"""The loop over layers of a model with several residual streams (Gemma 3n).

    embedding ─► streams ─► [ predict ─ layer, which reads one ─ correct ] x layers ─► mean ─► norm

Before a layer, each stream is predicted from all of them. The layer computes its attention and MLP
on the active stream alone; what they change there is added to every stream, times a factor that a
router gives each. Beside attention is a low-rank path (LAuReL).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.models.altup_spec import AltUpSpec
from engine.models.altup_weights import AltUpEnds, AltUpLayerWeights
from engine.models.block import AuxHiddenStates, Block
from engine.models.layer_state import LayerMemory
from engine.models.norms import Norm, bind_norm
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from kernels.operations import Operations

_LEAST_SIZE = 1e-5**0.5  # root mean square of a stream, in divisions by it


class _AltUpLayer(NamedTuple):
    weights: AltUpLayerWeights
    router_norm: Norm
    laurel_norm: Norm
    block: Block


class AltUpLayerStack:
    """All layers in order, and the streams between them; see ``LayerStack``.

    Args:
        spec: of the model.
        blocks: its layers.
        layers: the weights of each layer for the streams.
        ends: of the model for the streams.
        last_norm: the final norm.
        operations: compute the norms.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        blocks: Sequence[Block],
        layers: Sequence[AltUpLayerWeights],
        ends: AltUpEnds,
        last_norm: Norm,
        operations: Operations,
    ) -> None:
        assert spec.altup is not None
        self._streams: AltUpSpec = spec.altup
        self._router_scale = spec.hidden_size**-1.0
        self._layers = tuple(
            _AltUpLayer(
                weights,
                bind_norm(spec.norm, weights.router_norm, operations),
                bind_norm(spec.norm, weights.laurel_norm, operations),
                block,
            )
            for block, weights in zip(blocks, layers, strict=True)
        )
        self._ends = ends
        self._last_norm = last_norm

    def __call__(
        self,
        x: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerMemory],
        output_indices: torch.Tensor | None,
        aux_states: AuxHiddenStates | None = None,
    ) -> torch.Tensor:
        """Run the layers; see ``LayerStack``. There are no ``aux_states``: draft heads have been
        refused.

        x: [num_tokens, hidden_size] -> [num_wanted or num_tokens, hidden_size].
        """
        assert aux_states is None, "layers with several streams have no single input"
        assert state.per_layer is not None
        adapters, active = state.adapters, self._streams.active
        streams = self._enter(x)
        for i, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            block, part = layer.block, state.per_layer[:, i]
            streams = self._predict(layer, streams)
            read = streams[:, active].contiguous()
            normed = block.attention_norm(read)
            attended = block.attend(normed, state, cache)
            if i == len(self._layers) - 1 and output_indices is not None:
                adapters = state.output_adapters
                chosen = (streams, read, normed, attended, part)
                streams, read, normed, attended, part = (
                    tensor.index_select(0, output_indices) for tensor in chosen
                )
            laurel = layer.weights.laurel_up(layer.weights.laurel_down(normed))
            read = read + block.output(attended, adapters)
            read = (read + (normed + layer.laurel_norm(laurel))) * 2**-0.5
            made = read + block.mlp(block.mlp_norm(read), adapters, read)
            self._correct(layer, streams, made, part)
        return self._last_norm(self._leave(streams))

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        """Make the streams of the embeddings: [n, hidden_size] -> [n, S, hidden_size]."""
        others = self._ends.enter(x).unflatten(1, (self._streams.num_streams - 1, -1))
        return torch.cat((x.unsqueeze(1), _of_size(others, x.unsqueeze(1))), dim=1)

    def _leave(self, streams: torch.Tensor) -> torch.Tensor:
        """Merge the streams: [n, S, hidden_size] -> [n, hidden_size]."""
        first, *others = streams.unbind(1)
        leaving = zip(self._ends.leave, others, strict=True)
        merged = [_of_size(linear(stream.contiguous()), first) for linear, stream in leaving]
        return torch.stack((first, *merged)).mean(0)

    def _route(self, layer: _AltUpLayer, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, S], between -1 and 1."""
        routed = layer.weights.router(layer.router_norm(x) * self._router_scale)
        return routed.float().tanh().to(x.dtype)

    def _predict(self, layer: _AltUpLayer, streams: torch.Tensor) -> torch.Tensor:
        """Predict every stream from all: [n, S, hidden_size] -> the same, in a new tensor."""
        routed = self._route(layer, streams[:, self._streams.active].contiguous())
        shares = layer.weights.prediction(routed).unflatten(1, streams.shape[1:2] * 2)
        return torch.baddbmm(streams, shares, streams)

    def _correct(
        self, layer: _AltUpLayer, streams: torch.Tensor, made: torch.Tensor, part: torch.Tensor
    ) -> None:
        """Correct the predicted ``streams`` [n, S, hidden_size], in place, by what the layer
        ``made`` of the active one [n, hidden_size]; the layer's embeddings go to all but the first.

        part: [n, per_layer_size].
        """
        active = self._streams.active
        factors = layer.weights.correction(self._route(layer, made)) + 1.0
        change = made - streams[:, active]
        streams += change.unsqueeze(1) * factors.unsqueeze(2)
        first = streams[:, active]
        scaled = self._streams.scales_corrected
        first = first * layer.weights.scale if scaled else first.contiguous()
        streams[:, 1:] += layer.block.per_layer_addend(first, part).unsqueeze(1)


def _of_size(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scale vectors [..., hidden_size] to the root mean square of those of ``like``."""
    wanted, own = (_root_mean_square(each) for each in (like, x))
    return x * (wanted / own.clamp_(min=_LEAST_SIZE)).to(x.dtype)


def _root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """[..., d] -> [..., 1] float32: squares of float16 may be too large for float16."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.mul_(x.shape[-1] ** -0.5)
