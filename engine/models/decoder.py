"""The decoder: one for all families, made from a spec and its weights.

    embedding ─► [ attention ─ MLP ] x layers ─► norm ─► logits

``block.py`` says what a layer does and how layers hang together. Nothing of a step is kept here:
what a forward pass needs comes in its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.models.block import Block, Rotation, StepState, Walk
from engine.models.modules import Modules
from engine.models.norms import bind_norm
from engine.models.rope import inverse_frequencies
from engine.models.spec import DecoderSpec
from kernels.attention import LayerCache
from kernels.operations import Kernels

__all__ = ["Decoder", "StepState"]


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
        self._operations = kernels.operations
        self._modules = modules
        weight = modules.norm.weight
        # As a tensor of the model's dtype would hold it: checkpoints were trained with that.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=weight.dtype).item()
        blocks = [Block(spec, layer, kernels, i) for i, layer in enumerate(modules.layers)]
        self._walk = Walk(spec, blocks, bind_norm(spec.norm, modules.norm, self._operations))
        self._ropes: list[tuple[torch.Tensor, float, int | None]] = []
        for rope in spec.ropes:
            frequencies, scale = inverse_frequencies(
                rope, spec.head_dim, spec.max_position_embeddings, max_model_len
            )
            turned = None if rope.num_dims is None else rope.num_dims // 2
            self._ropes.append((frequencies.to(weight.device), scale, turned))

    def rotations(self, positions: torch.Tensor) -> tuple[Rotation, ...]:
        """Cosines and sines of a step's positions, for its ``StepState``."""
        return tuple(self._rotation(positions, *rope) for rope in self._ropes)

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
        x = self._modules.embed(input_ids)
        if self._modules.positions is not None:
            x = x + functional.embedding(state.positions, self._modules.positions)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        return self._walk(x, state, caches, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head says, in float32: [rows, hidden_size] -> [rows, vocab_size], the scores of
        the next token, or [rows, num_labels] where the head is a classifier's.
        """
        assert self._modules.head is not None, "a model without a head was asked for scores"
        logits = self._modules.head.logits(hidden)
        if not self.spec.generates:
            return logits
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _rotation(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float, turned: int | None
    ) -> Rotation:
        if turned is None or scale == 1.0:
            return self._operations.rope_tables(positions, frequencies, scale)
        # Dimensions that are not rotated are not scaled either.
        cos, sin = self._operations.rope_tables(positions, frequencies, 1.0)
        cos[..., :turned] *= scale
        sin[..., :turned] *= scale
        return cos, sin
