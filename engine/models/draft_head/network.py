"""The forward pass of a draft head: its layer, and what precedes and follows it.

A head at position t reads the token at t + 1, e, and the model's state of the text up to t, f; it
predicts the token at t + 2:

    mtp, eagle    x = fc[norm(e), norm(f)]    x += attention(norm(x))            x += mlp(norm(x))
    eagle3        x = f                       x += attention[norm(e), norm(f)]   x += mlp(norm(x))

(EAGLE's first version has only the MLP's norm.) From its second draft on it reads its own x instead
of f; Qwen's mtp reads the final norm of x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.models.block import Block
from engine.models.draft_head.spec import DraftHeadSpec
from engine.models.embeddings import Rotations, finish_logits
from engine.models.layer_state import LayerMemory
from engine.models.linear import Head, Linear
from engine.models.modules import Layer
from engine.models.norms import IdentityNorm, NormWeights, RmsNorm
from engine.models.spec import DecoderSpec
from engine.models.step_state import Rotation, StepState
from kernels.operations import Kernels


@dataclass(frozen=True, slots=True)
class DraftHeadModules:
    """Everything loaded of a head, and what it borrows from its model."""

    fc: Linear
    token_norm: NormWeights | None
    state_norm: NormWeights | None
    layer: Layer
    norm: NormWeights | None
    embed: Callable[[torch.Tensor], torch.Tensor]  # ids [n] -> [n, hidden_size]
    head: Head  # scores tokens
    head_spec: DecoderSpec  # how its scores are finished
    # [num_scored] int64, the tokens; None: all, in their order.
    draft_vocab_ids: torch.Tensor | None


class DraftHead:
    """A loaded draft head, with the interface of a one-layer decoder.

    Args:
        spec: the head.
        modules: its parameters.
        kernels: compute the attention and everything that is not a matrix product.
        max_model_len: longest context served, in tokens.
        device: of the parameters.
    """

    def __init__(
        self,
        spec: DraftHeadSpec,
        modules: DraftHeadModules,
        kernels: Kernels,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.spec = spec.layer
        self.aux_layers = spec.aux_layers
        self._reads_both = spec.kind == "eagle3"
        self._returns_normed = spec.kind == "qwen_mtp"
        self._modules = modules
        self._operations = operations = kernels.operations
        eps = spec.layer.norm.eps

        def norm(weights: NormWeights | None) -> RmsNorm | IdentityNorm:
            return IdentityNorm() if weights is None else RmsNorm(weights.weight, eps, operations)

        self._token_norm = norm(modules.token_norm)
        self._state_norm = norm(modules.state_norm)
        self._norm = norm(modules.norm)
        self._block = Block(spec.layer, modules.layer, kernels, 0)
        self._rotations = Rotations(spec.layer, max_model_len, operations, device)

    def rotations(self, positions: torch.Tensor) -> tuple[Rotation, ...]:
        """Return the cosines and sines of a step's positions, for its ``StepState``."""
        return self._rotations(positions)

    def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
        """Reduce a token's tapped states, concatenated in [n, taps * T], to [n, hidden_size]."""
        return self._modules.fc(states) if self.aux_layers else states

    def forward(
        self,
        input_ids: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerMemory],
        output_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer, and store its keys and values.

        Args:
            input_ids: [num_tokens] int64, each the token after the one whose state it is read with.
            state: the step's, with ``previous_hidden_states``.
            caches: of its one layer, updated in place.
            output_indices: [num_wanted] int64, the tokens whose result is read; None: all of them.

        Returns:
            [num_wanted or num_tokens, hidden_size], for ``logits`` and as input of the next draft.
        """
        assert state.previous_hidden_states is not None
        block = self._block
        both = torch.cat(
            (
                self._token_norm(self._modules.embed(input_ids)),
                self._state_norm(state.previous_hidden_states),
            ),
            dim=-1,
        )
        if self._reads_both:
            x, read = state.previous_hidden_states.clone(), both
        else:
            x = self._modules.fc(both)
            read = block.attention_norm(x)
        attended = block.attend(read, state, caches[0])
        if output_indices is not None:
            x, attended = (
                x.index_select(0, output_indices),
                attended.index_select(0, output_indices),
            )
        normed = block.mlp_norm.add_norm(block.output(attended, None), x)
        x += block.mlp(normed, None, x)
        return self._norm(x) if self._returns_normed else x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32; -inf for tokens that it does not score."""
        modules = self._modules
        said = modules.head.logits(hidden if self._returns_normed else self._norm(hidden))
        scores = finish_logits(modules.head_spec, said, self._operations).float()
        if modules.draft_vocab_ids is None:
            return scores
        shape = scores.shape[0], self.spec.vocab_size
        return scores.new_full(shape, float("-inf")).index_copy_(1, modules.draft_vocab_ids, scores)
