"""What precedes and follows a decoder's layers.

Each piece is separate from the layers, so that a model can also be run layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from engine.models.norms import Norm
from engine.models.rope import inverse_frequencies
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec
from engine.models.step_state import Rotation
from kernels.operations import Operations


class Embeddings:
    """From tokens to the residual stream.

    Args:
        spec: of the model.
        embed: ids [n] -> [n, hidden_size].
        positions: [max_position_embeddings, hidden_size], if they are learned.
        norm: applied last; None: there is none.
        dtype: the model's.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        embed: Callable[[torch.Tensor], torch.Tensor],
        positions: torch.Tensor | None,
        norm: Norm | None,
        dtype: torch.dtype,
    ) -> None:
        self._embed = embed
        self._positions = positions
        self._norm = norm
        # Rounded to the model's dtype, as in the code that checkpoints were trained with.
        self._scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Ids and positions, both [n] int64 -> [n, hidden_size]."""
        x = self._embed(input_ids)
        if self._positions is not None:
            # Padding of captured steps has positions below 0, illegal indices on a GPU.
            x = x + functional.embedding(positions.clamp(min=0), self._positions)
        x = x if self._scale == 1.0 else x * self._scale
        return x if self._norm is None else self._norm(x)


class Rotations:
    """Cosines and sines of positions, for each of a model's rotary embeddings."""

    def __init__(
        self, spec: DecoderSpec, max_model_len: int, operations: Operations, device: torch.device
    ) -> None:
        self._operations = operations
        self._ropes: list[tuple[torch.Tensor, float, int | None]] = []
        for rope, head_dim in zip(spec.ropes, spec.rope_head_dims, strict=True):
            frequencies, scale = inverse_frequencies(
                rope, head_dim, spec.max_position_embeddings, max_model_len
            )
            turned = None if rope.num_dims is None else rope.num_dims // 2
            self._ropes.append((frequencies.to(device), scale, turned))
        planes = [rope.mrope for rope in spec.ropes]
        self._axes = [
            None if plane is None else _axes(plane, frequencies)
            for plane, (frequencies, _, _) in zip(planes, self._ropes, strict=True)
        ]

    def __call__(self, positions: torch.Tensor) -> tuple[Rotation, ...]:
        """Compute the tables of positions [n], or three-dimensional [3, n], for a ``StepState``."""
        if positions.dim() == 1:
            return tuple(self._rotation(positions, *rope) for rope in self._ropes)
        found = []
        for rope, axes in zip(self._ropes, self._axes, strict=True):
            assert axes is not None, "a model of one dimension was asked for three"
            by_axis = [self._rotation(along.contiguous(), *rope) for along in positions]
            cosines, sines = zip(*by_axis, strict=True)
            found.append((_by_axis(axes, cosines), _by_axis(axes, sines)))
        return tuple(found)

    def _rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float, turned: int | None
    ) -> Rotation:
        if turned is None or scale == 1.0:
            return self._operations.rope_tables(positions, frequencies, scale)
        # Dimensions that are not rotated are not scaled either.
        cos, sin = self._operations.rope_tables(positions, frequencies, 1.0)
        cos[..., :turned].mul_(scale)
        sin[..., :turned].mul_(scale)
        return cos, sin


def _axes(planes: MropeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """[dim / 2], which of the three positions rotates each frequency."""
    axes = [planes.axis(i) for i in range(frequencies.numel())]
    return torch.tensor(axes, device=frequencies.device)


def _by_axis(axes: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Merge three tables [n, 1, dim / 2] into one, taking each column from its axis's table."""
    first, second, third = parts
    return torch.where(axes == 0, first, torch.where(axes == 1, second, third))


def finish_logits(spec: DecoderSpec, logits: torch.Tensor, operations: Operations) -> torch.Tensor:
    """Scale and cap the head's output [n, vocab_size].

    The result is in float32 if the model scales or caps, in place if the output is float32 already.
    """
    cap, scale = spec.logit_softcap, spec.logit_scale
    if not spec.is_generative or (scale == 1.0 and cap is None):
        return logits
    logits = logits.float()
    if scale != 1.0:
        logits = logits.mul_(scale)
    return logits if cap is None else operations.softcap(logits, cap)
