"""The model's hidden states of all tokens in its KV cache, kept for a head that drafts from them.

A head reads the model's states of *every* token of a text, including cached prefixes, but the model
computes each token only once. So the states are stored beside the KV cache, under the same slots:

    step ─► hidden states ─► condensed ─► table[slot]  ◄─ blocks are shared, copied and freed
                                              │           like those of keys and values
                            head ◄── later ───┘

A block has states whenever it has keys and values, so a head can read a text only when it has to
draft for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kv_cache.storage import zeros
from engine.models.block import AuxHiddenStates
from engine.models.decoder import Decoder
from engine.models.draft_head.network import DraftHead
from engine.models.layer_state import LayerMemory
from engine.models.step_state import StepState
from engine.types import BlockCopy
from kernels.transfer import to_device


class Features:
    """The table of states, and how a step fills it.

    Args:
        head: reads the table.
        num_blocks, block_size: of the KV cache.
        dtype: of hidden states.
        device: of the model.
    """

    def __init__(
        self,
        head: DraftHead,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.head = head
        self._block_size = block_size
        shape = (num_blocks * block_size, head.spec.hidden_size)
        self._table = zeros(shape, dtype, device)

    def run(
        self,
        model: Decoder,
        input_ids: torch.Tensor,
        state: StepState,
        caches: Sequence[LayerMemory],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model; returns its result for all tokens, and the features to keep.

        The shapes are [num_tokens, hidden_size] and [num_tokens, the head's hidden_size].
        """
        taps = AuxHiddenStates(self.head.aux_layers) if self.head.aux_layers else None
        hidden = model.forward(input_ids, state, caches, None, taps)
        if taps is None:
            return hidden, hidden
        assert taps.states is not None
        return hidden, self.head.combine_hidden_states(taps.states)

    def store(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Store the features of tokens in these slots: [n] int64 and [n, hidden_size]."""
        self._table.index_copy_(0, slots, features)

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """The features in these slots: [n] int64 -> [n, hidden_size]."""
        return self._table.index_select(0, slots)

    def blocks(self) -> torch.Tensor:
        """A view of the table by blocks: [num_blocks, block_size, hidden_size]."""
        return self._table.view(-1, self._block_size, self._table.shape[1])

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first block of each pair to the second."""
        sources, targets = to_device(torch.tensor(copies), self._table.device).T
        blocks = self.blocks()
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))
