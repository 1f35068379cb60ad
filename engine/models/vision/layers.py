"""The parts of a vision encoder, made from its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.models.vision.patches import Windows, chunk_slices
from engine.models.vision.positions import PatchRotation
from engine.models.vision.spec import MergerSpec, VisionActivation, VisionNorm
from kernels.dense import attend

Tensors = Mapping[str, torch.Tensor]
ACTIVATIONS: dict[VisionActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: (x * 1.702).sigmoid_().mul_(x),
    "silu": functional.silu,
}


@dataclass(frozen=True, slots=True)
class Projection:
    """``x W^T + b``: [n, inputs] -> [n, outputs]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the projection to a batch of rows."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """A layer norm, or an RMS norm without a bias: [n, dim] -> [n, dim]."""

    spec: VisionNorm
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of each row."""
        if self.spec.kind == "rms":
            return functional.rms_norm(x, self.weight.shape, self.weight, self.spec.eps)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.spec.eps)


class BlockShape(Protocol):
    """The part of an encoder's spec that the usual layer depends on; audio encoders have it too."""

    @property
    def num_heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def gated(self) -> bool:
        """Whether the MLP is gated."""
        ...

    @property
    def qk_norm(self) -> VisionNorm | None:
        """The norm of queries and keys over all heads, if they have one."""
        ...

    @property
    def norm(self) -> VisionNorm:
        """The norms before attention and MLP."""
        ...

    @property
    def activation(self) -> VisionActivation:
        """The MLP's."""
        ...


class MergedStates(Protocol):
    """The part of an encoder's spec that a merger depends on."""

    @property
    def merged_size(self) -> int:
        """Width of what becomes one embedding."""
        ...


class Layer(ABC):
    """A layer of an encoder: attention and an MLP, each added to its input."""

    scale: float | None = None  # of scores; None: head_dim ** -0.5

    def forward_chunks(
        self,
        x: torch.Tensor,
        rotation: PatchRotation | None,
        windows: Sequence[Windows],
        max_patches: int,
    ) -> Iterator[None]:
        """Compute [num_patches, hidden_size] in place, about ``max_patches`` patches per iteration.

        Patches attend to those of their window.
        """
        parts: list[tuple[torch.Tensor, ...]] = []
        for rows in chunk_slices(x.shape[0], max_patches):
            parts.append(self.heads(x[rows], None if rotation is None else rotation.select(rows)))
            yield
        query, key, value = parts[0]
        if len(parts) > 1:
            query, key, value = (torch.cat(each) for each in zip(*parts, strict=True))
        parts.clear()
        for window in windows:
            # As attention reads them: [num_windows, heads, length, head_dim].
            keys = window.view_windows(key).transpose(1, 2).contiguous()
            values = window.view_windows(value).transpose(1, 2).contiguous()
            for own, seen in window.split(max_patches):
                attended = attend(own.view_windows(query), keys[seen], values[seen], self.scale)
                part = x[own.begin : own.end]
                part += self.output(attended.view(part.shape))
                part += self.mlp(part)
                yield

    @abstractmethod
    def heads(self, x: torch.Tensor, rotation: PatchRotation | None) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values of patches, each [num_patches, heads, head_dim]."""

    @abstractmethod
    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Return what attention adds: [num_patches, hidden_size] -> the same shape."""

    @abstractmethod
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the MLP adds: [num_patches, hidden_size] -> the same shape."""


class Block(Layer):
    """The usual pre-norm layer."""

    def __init__(self, spec: BlockShape, weights: Tensors, name: str) -> None:
        self._num_heads = spec.num_heads
        self._gated = spec.gated
        self._norm_by_head = spec.qk_norm is not None and spec.qk_norm.by_head
        self._query_norm = self._key_norm = None
        if spec.qk_norm is not None:
            self._query_norm = read_norm(spec.qk_norm, weights, f"{name}.query_norm")
            self._key_norm = read_norm(spec.qk_norm, weights, f"{name}.key_norm")
        self._attention_scale = weights.get(f"{name}.attention_scale")
        self._mlp_scale = weights.get(f"{name}.mlp_scale")
        self._activate = ACTIVATIONS[spec.activation]
        self._attention_norm = read_norm(spec.norm, weights, f"{name}.attention_norm")
        self._qkv = read_projection(weights, f"{name}.qkv")
        self._output = read_projection(weights, f"{name}.output")
        self._mlp_norm = read_norm(spec.norm, weights, f"{name}.mlp_norm")
        self._up = read_projection(weights, f"{name}.up")
        self._down = read_projection(weights, f"{name}.down")

    def heads(self, x: torch.Tensor, rotation: PatchRotation | None) -> tuple[torch.Tensor, ...]:
        """See ``Layer``."""
        fused = self._qkv(self._attention_norm(x))
        query, key, value = self._split_heads(fused)
        if self._query_norm is not None and self._key_norm is not None:
            if not self._norm_by_head:
                query, key = query.flatten(1), key.flatten(1)
            query, key = self._query_norm(query), self._key_norm(key)
            query, key = query.view(value.shape), key.view(value.shape)
        if rotation is not None:
            query, key = rotation.rotate(query), rotation.rotate(key)
        return query, key, value

    def _split_heads(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values; a key or value that heads share is repeated for each."""
        num_heads = self._num_heads
        head_dim = self._output.weight.shape[1] // num_heads
        heads = fused.view(fused.shape[0], -1, head_dim)
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if num_kv_heads < num_heads:
            group = num_heads // num_kv_heads
            key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        return query, key, value

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """See ``Layer``."""
        return _scaled(self._output(attended), self._attention_scale)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Layer``."""
        inner = self._up(self._mlp_norm(x))
        if self._gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._activate(gate).mul_(up)
        else:
            inner = self._activate(inner)
        return _scaled(self._down(inner), self._mlp_scale)


class Merger:
    """Turns the patches of each cell into an embedding of the text model; see ``MergerSpec``.

    Args:
        spec: of the encoder.
        merger: its spec.
        weights: of the encoder.
        name: the prefix of the merger's parameter names.
    """

    def __init__(self, spec: MergedStates, merger: MergerSpec, weights: Tensors, name: str) -> None:
        self._width = spec.merged_size
        self._norm: Normalisation | None = None
        if merger.norm is not None:
            self._norm = read_norm(merger.norm, weights, f"{name}.norm")
        self._norm_of_cells = merger.norm_of_cells
        self._gated = merger.gated
        self._join: torch.Tensor | None = None
        if merger.joined:
            self._join = weights[f"{name}.join.weight"]
        self._up = read_projection(weights, f"{name}.up")
        self._activate = ACTIVATIONS[merger.activation]
        self._down: Projection | None = None
        if merger.inner_size is not None:
            self._down = read_projection(weights, f"{name}.down")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_patches, hidden_size], each cell's patches adjacent -> [num_cells, out_size]."""
        if self._norm_of_cells:
            x = x.reshape(-1, self._width)
        if self._norm is not None:
            x = self._norm(x)
        x = x.reshape(-1, self._width)
        if self._join is not None:
            x = functional.linear(x, self._join)
        made = self._up(x)
        if self._down is None:
            return made
        if self._gated:
            made, gate = made.chunk(2, dim=-1)
            return self._down(self._activate(gate).mul_(made))
        return self._down(self._activate(made))


def read_norm(spec: VisionNorm, weights: Tensors, name: str) -> Normalisation:
    """Make the norm whose weight is called ``name``."""
    bias = weights[f"{name}.bias"] if spec.kind == "layer" else None
    return Normalisation(spec, weights[name], bias)


def read_projection(weights: Tensors, name: str) -> Projection:
    """Make the projection whose tensors' names begin with ``name``; the bias is optional."""
    bias = weights.get(f"{name}.bias")
    return Projection(weights[f"{name}.weight"], bias)


def _scaled(x: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Multiply in place by a factor for each dimension, if there are any."""
    return x if factors is None else x.mul_(factors)
