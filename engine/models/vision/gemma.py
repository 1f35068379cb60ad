"""The parts specific to Gemma's vision encoders, made from their weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.models.vision.layers import ACTIVATIONS, Layer, Tensors, read_norm
from engine.models.vision.positions import PatchRotation
from engine.models.vision.spec import PoolSpec, VisionSpec


class PatchPooler:
    """Turns the patches of each cell into an embedding of the text model; see ``PoolSpec``.

    Args:
        spec: of the encoder.
        pool: its pool.
        weights: its parameters.
    """

    def __init__(self, spec: VisionSpec, pool: PoolSpec, weights: Tensors) -> None:
        self._pool = pool
        self._shape = -1, spec.merge_size**2, spec.hidden_size
        self._weight = weights["merger.norm"] + 1 if pool.weighted else None
        self._projection = weights["merger.projection.weight"]
        self._standard: tuple[torch.Tensor, torch.Tensor] | None = None
        if pool.standardised:
            self._standard = weights["merger.mean"], weights["merger.scale"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_patches, hidden_size], each cell's patches adjacent -> [num_cells, out_size]."""
        # Scaled numbers may exceed float16's range.
        pooled = x.reshape(self._shape).mean(1, dtype=torch.float32).mul_(self._pool.scale)
        if self._standard is not None:
            mean, scale = self._standard
            pooled = pooled.sub_(mean).mul_(scale)
        normed = functional.rms_norm(pooled, pooled.shape[1:], self._weight, self._pool.eps)
        return functional.linear(normed.to(x.dtype), self._projection)


class ClippedProjections:
    """Concatenated projections without biases: [n, inputs] -> [n, outputs].

    If the checkpoint has bounds, each projection clamps its inputs and outputs to its own.

    Args:
        weights: of the encoder.
        name: the prefix of their parameters' names.
        count: number of projections, all of the same size.
    """

    def __init__(self, weights: Tensors, name: str, count: int = 1) -> None:
        self._weight = weights[f"{name}.weight"]
        bounds = weights.get(f"{name}.bounds")
        self._parts: tuple[tuple[torch.Tensor, list[float]], ...] = ()
        if bounds is not None:
            parts = self._weight.chunk(count)
            self._parts = tuple(zip(parts, bounds.view(-1, 4).tolist(), strict=True))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the projections to a batch of rows."""
        if not self._parts:
            return functional.linear(x, self._weight)
        made = []
        for weight, (lowest, highest, least, most) in self._parts:
            made.append(functional.linear(x.clamp(lowest, highest), weight).clamp_(least, most))
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)


class SandwichBlock(Layer):
    """A layer of Gemma 4: attention and a gated MLP, each between two norms."""

    scale = 1.0

    def __init__(self, spec: VisionSpec, weights: Tensors, name: str) -> None:
        self._shape = -1, 3, spec.num_heads, spec.head_dim
        self._eps = spec.norm.eps
        self._activate = ACTIVATIONS[spec.activation]
        self._attention_norm = read_norm(spec.norm, weights, f"{name}.attention_norm")
        self._qkv = ClippedProjections(weights, f"{name}.qkv", 3)
        self._query_norm = read_norm(spec.norm, weights, f"{name}.query_norm")
        self._key_norm = read_norm(spec.norm, weights, f"{name}.key_norm")
        self._output = ClippedProjections(weights, f"{name}.output")
        self._post_attention_norm = read_norm(spec.norm, weights, f"{name}.attention_after")
        self._mlp_norm = read_norm(spec.norm, weights, f"{name}.mlp_norm")
        self._up = ClippedProjections(weights, f"{name}.up", 2)
        self._down = ClippedProjections(weights, f"{name}.down")
        self._post_mlp_norm = read_norm(spec.norm, weights, f"{name}.mlp_after")

    def heads(self, x: torch.Tensor, rotation: PatchRotation | None) -> tuple[torch.Tensor, ...]:
        """See ``Layer``."""
        query, key, value = self._qkv(self._attention_norm(x)).view(self._shape).unbind(1)
        query, key = self._query_norm(query), self._key_norm(key)
        value = functional.rms_norm(value, value.shape[-1:], None, self._eps)
        if rotation is not None:
            query, key = rotation.rotate(query), rotation.rotate(key)
        return query, key, value

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """See ``Layer``."""
        return self._post_attention_norm(self._output(attended))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Layer``."""
        gate, up = self._up(self._mlp_norm(x)).chunk(2, dim=-1)
        return self._post_mlp_norm(self._down(self._activate(gate).mul_(up)))
