"""Captured passes of a draft head: of a few tokens each, so that launching them takes longest.

    unread tokens ─► [ features ─ layer ─ logits ] ─► [ sample ]       a row for each token
    drafts        ─► [ own states ─ layer ─ logits ] ─► [ sample ]     for each further draft

Both leave the head's states where the second one reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.kv_cache.storage import KVCache
from engine.models.draft_head.network import DraftHead
from engine.models.layer_state import LayerMemory
from engine.models.spec import DecoderSpec
from engine.models.step_state import Rotation, StepState
from engine.runner.graphs import Capture, DecodeGraphs
from engine.runner.rows import RowTable
from engine.speculation.features import Features
from kernels.attention import AttentionSpec
from kernels.operations import Kernels

# A head drafts the token behind the next one.
HEAD_LEAD = 1


class HeadGraphs:
    """The captured passes of a head.

    Args:
        features: the head, and what it reads.
        cache: its KV cache.
        kernels: those the head was made with.
        spec: what they were chosen for.
        rows: the runner's row table.
        capture: records what a pass launches.
    """

    def __init__(
        self,
        features: Features,
        cache: KVCache,
        kernels: Kernels,
        spec: AttentionSpec,
        rows: RowTable,
        capture: Capture,
    ) -> None:
        num_rows, head = rows.padding_slot, features.head
        shape = num_rows, head.spec.hidden_size
        # [rows, hidden_size], of the last pass; the next one's rows come first.
        self.states = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        parts = cache, kernels, spec, rows, num_rows, capture

        def graphs(reader: _Reader) -> DecodeGraphs:
            return DecodeGraphs(reader, *parts, enable_feedback=False, lead=HEAD_LEAD)

        self.reading = graphs(_Reader(head, self.states, features))
        self.following = graphs(_Reader(head, self.states, None))

    def capture_next(self) -> bool:
        """Capture one more size of either pass; return whether more remain."""
        return self.reading.capture_next() or self.following.capture_next()


class _Reader:
    """A head as a decoder: it finds what it reads beside the tokens, and keeps what it makes.

    Args:
        head: the head.
        states: where its states are kept.
        features: what it reads; None: ``states``.
    """

    def __init__(self, head: DraftHead, states: torch.Tensor, features: Features | None) -> None:
        self._head = head
        self._states = states
        self._features = features

    @property
    def spec(self) -> DecoderSpec:
        """See ``Decoder``."""
        return self._head.spec

    def rotations(self, positions: torch.Tensor) -> tuple[Rotation, ...]:
        """See ``Decoder.rotations``."""
        return self._head.rotations(positions)

    def forward(
        self, input_ids: torch.Tensor, state: StepState, caches: Sequence[LayerMemory]
    ) -> torch.Tensor:
        """See ``Decoder.forward``."""
        own = self._states[: input_ids.shape[0]]
        # Padding has no slot.
        slots = state.slot_mapping.clamp(min=0)
        read = own if self._features is None else self._features.of(slots)
        hidden = self._head.forward(input_ids, replace(state, previous_hidden_states=read), caches)
        own.copy_(hidden)
        return hidden

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Decoder.raw_logits``."""
        return self._head.logits(hidden)
