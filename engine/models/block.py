"""One layer of a decoder at work, and the ways in which layers hang together.

A walk goes through all layers of a step. It carries the residual stream ``x`` and knows where
norms stand; what attention and MLP are is the block's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.models.adapters import Adapters
from engine.models.experts import bind_mlp
from engine.models.latent import LatentAttention
from engine.models.modules import Layer
from engine.models.norms import Norm, NormWeights, SharedRmsNorm, Unnormed, bind_norm
from engine.models.peers import Peers
from engine.models.spec import DecoderSpec, TemperatureSpec
from kernels.attention import LayerCache
from kernels.operations import Kernels

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of a step's positions


@dataclass(frozen=True, slots=True)
class StepState:
    """What the layers of one step share."""

    attention: Any  # the backend's plan
    slot_mapping: torch.Tensor  # [num_tokens] int64: where each token's keys and values go
    positions: torch.Tensor  # [num_tokens] int64
    rotations: tuple[Rotation, ...]  # of the positions, one for each of the model's ropes
    adapters: Adapters | None = None  # of the tokens; None: no row has any
    wanted_adapters: Adapters | None = None  # of the tokens whose result is read
    # [num_tokens, hidden_size], what a head that drafts reads beside the tokens
    read_states: torch.Tensor | None = None


class Taps:
    """Copies of the residual stream as it enters some layers, side by side for each token.

    Args:
        layers: theirs, in order.
    """

    __slots__ = ("_places", "states")

    def __init__(self, layers: Sequence[int]) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self.states: torch.Tensor | None = None  # [num_tokens, len(layers) * hidden_size]

    def note(self, layer: int, x: torch.Tensor) -> None:
        """``x`` [num_tokens, hidden_size] is about to enter a layer."""
        place = self._places.get(layer)
        if place is None:
            return
        count, size = x.shape
        if self.states is None:
            self.states = x.new_empty((count, len(self._places) * size))
        self.states[:, place * size : (place + 1) * size].copy_(x)


class Block:
    """A layer's attention and MLP, each from what it reads to what is added to ``x``.

    Args:
        spec: of the model, or of this rank's share of it.
        layer: its parameters.
        kernels: what computes attention and all that is no matrix product.
        index: which layer it is.
        peers: the ranks that have the other shares; None: there are none.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layer: Layer,
        kernels: Kernels,
        index: int,
        peers: Peers | None = None,
    ) -> None:
        self._spec = spec
        self._qkv_name = f"{index}.qkv.weight"
        self._output_name = f"{index}.output.weight"
        self._layer = layer
        tuned = spec.temperature
        self._is_tempered = tuned is not None and (layer.rope is None or tuned.with_rope)
        self._attention, self._operations = kernels
        self.feed = bind_mlp(spec, layer.mlp, self._operations, index)
        self._scale = spec.residual_scale
        self._num_heads = spec.num_heads + 2 * spec.num_kv_heads

        def norm(weights: NormWeights | None) -> Norm | None:
            return None if weights is None else bind_norm(spec.norm, weights, self._operations)

        self.attention_norm: Norm = norm(layer.attention_norm) or Unnormed()
        self.mlp_norm: Norm = norm(layer.mlp_norm) or Unnormed()
        self._attention_after = norm(layer.attention_after)
        self._mlp_after = norm(layer.mlp_after)
        self._peers = peers

        def wide_norm(weights: NormWeights | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
            if weights is None or peers is None:
                return norm(weights)
            return SharedRmsNorm(weights.weight, spec.norm.eps, peers)

        self._query_norm = wide_norm(layer.wide_query_norm)
        self._key_norm = wide_norm(layer.wide_key_norm)
        self._latent = None
        if layer.latent is not None and spec.latent is not None:
            self._latent = LatentAttention(
                spec, spec.latent, layer.latent, layer.attention, kernels, index
            )

    def attend(self, read: torch.Tensor, state: StepState, cache: LayerCache) -> torch.Tensor:
        """Store keys and values; [num_tokens, hidden_size] -> [num_tokens, attended_size]."""
        spec, layer = self._spec, self._layer
        fused = layer.qkv(read)
        if state.adapters is not None:
            fused = state.adapters.add(fused, read, self._qkv_name)
        if self._latent is not None:
            assert layer.rope is not None
            return self._latent(fused, state, state.rotations[layer.rope], cache)
        if self._query_norm is not None:
            fused = self._norm_wide(fused)
        query = self._operations.norm_rope_store(
            fused.view(-1, self._num_heads, spec.head_dim),
            layer.qk_norm,
            spec.norm.eps,
            None if layer.rope is None else state.rotations[layer.rope],
            cache,
            state.slot_mapping,
        )
        if layer.query_scale is not None:
            query *= layer.query_scale
        if self._is_tempered:
            assert spec.temperature is not None
            query *= _temperatures(state.positions, spec.temperature)
        attended = self._attention.forward(state.attention, layer.attention, query, cache)
        return attended.view(-1, spec.query_size)

    def output(self, attended: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
        """[n, attended_size] -> [n, hidden_size], to be added."""
        out = self._layer.output(attended)
        if adapters is not None:
            out = adapters.add(out, attended, self._output_name)
        return self._finish(out, self._attention_after)

    def mlp(self, read: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
        """[n, hidden_size] -> [n, hidden_size], to be added."""
        return self._finish(self.feed(read, adapters), self._mlp_after)

    def _finish(self, out: torch.Tensor, after: Norm | None) -> torch.Tensor:
        if self._peers is not None:
            out = self._peers.all_reduce(out)
        if after is not None:
            out = after(out)
        return out if self._scale == 1.0 else out.mul_(self._scale)

    def _norm_wide(self, fused: torch.Tensor) -> torch.Tensor:
        assert self._query_norm is not None
        assert self._key_norm is not None
        sizes = (self._spec.query_size, self._spec.kv_size, self._spec.kv_size)
        query, key, value = fused.split(sizes, dim=-1)
        query, key = self._query_norm(query.contiguous()), self._key_norm(key.contiguous())
        return torch.cat((query, key, value), dim=-1)


class _Pass(NamedTuple):
    """What a walk through the layers is given beside the residual stream."""

    state: StepState
    caches: Sequence[LayerCache]  # one for each layer, written in place
    wanted: torch.Tensor | None  # [num_wanted] int64, the tokens whose result is read
    taps: Taps | None


class Walk:
    """All layers, one after the other.

    Args:
        spec: of the model.
        blocks: its layers.
        last_norm: the norm behind them.
    """

    def __init__(self, spec: DecoderSpec, blocks: Sequence[Block], last_norm: Norm) -> None:
        # The norm behind each layer: the next layer's, and after the last the model's own.
        norms = (*(block.attention_norm for block in blocks[1:]), last_norm)
        self._blocks = tuple(zip(blocks, norms, strict=True))
        self._first_norm = blocks[0].attention_norm
        self._last = blocks[-1]
        self._shares_norm = spec.shared_norm
        self._is_parallel = spec.placement == "parallel"

    def __call__(
        self,
        x: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerCache],
        wanted: torch.Tensor | None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """The last norm of the residual stream, of the tokens ``wanted``, or of all.

        Args:
            x: [num_tokens, hidden_size], overwritten.
            state: the step's.
            caches: one for each layer, written in place.
            wanted: [num_wanted] int64, or None.
            taps: told of what enters the layers.

        Returns:
            [num_wanted or num_tokens, hidden_size].
        """
        # Not bound once: a walk that refers to itself would keep its layers until it is collected.
        go = self._side_by_side if self._is_parallel else self._in_turn
        return go(x, _Pass(state, caches, wanted, taps))

    def _in_turn(self, x: torch.Tensor, given: _Pass) -> torch.Tensor:
        """Attention, then the MLP. Norms that a placement does not have change nothing."""
        state, caches, wanted, taps = given
        adapters = state.adapters
        # The sum and the norm behind it are one operation, so a layer ends with the next one's.
        normed = self._first_norm(x)
        for i, ((block, next_norm), cache) in enumerate(zip(self._blocks, caches, strict=True)):
            if taps is not None:
                taps.note(i, x)
            attended = block.attend(normed, state, cache)
            if block is self._last and wanted is not None:
                adapters = state.wanted_adapters
                x, attended = _select(wanted, x, attended)
            normed = block.mlp_norm.add(block.output(attended, adapters), x)
            normed = next_norm.add(block.mlp(normed, adapters), x)
        return normed

    def _side_by_side(self, x: torch.Tensor, given: _Pass) -> torch.Tensor:
        """Attention and MLP of the same residual stream."""
        state, caches, wanted, taps = given
        adapters = state.adapters
        normed = self._first_norm(x)
        for i, ((block, next_norm), cache) in enumerate(zip(self._blocks, caches, strict=True)):
            if taps is not None:
                taps.note(i, x)
            attended = block.attend(normed, state, cache)
            read = normed if self._shares_norm else block.mlp_norm(x)
            if block is self._last and wanted is not None:
                adapters = state.wanted_adapters
                x, attended, read = _select(wanted, x, attended, read)
            out = block.output(attended, adapters)
            out += block.mlp(read, adapters)
            normed = next_norm.add(out, x)
        return normed


def _temperatures(positions: torch.Tensor, spec: TemperatureSpec) -> torch.Tensor:
    """What queries are multiplied by: [n] int64 -> [n, 1, 1] float32."""
    periods = ((positions + spec.first) // spec.every).float()
    return (1.0 + spec.scale * torch.log1p(periods)).view(-1, 1, 1)


def _select(wanted: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Once the last keys and values are stored, no token needs the others' results."""
    return [tensor.index_select(0, wanted) for tensor in tensors]
