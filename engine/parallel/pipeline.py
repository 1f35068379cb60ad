"""The path of a step through the stages of a model, as one rank sees it.

    (0, t) ── residual stream ──► (1, t) ── ... ──► (last, t)      rank t of each stage
    (last, 0) ── states of the rows that are wanted ──► (0, 0)

Sends are buffered, so a rank can begin another step before the next one has received its result.
Steps pass through in launch order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.models.spec import DecoderSpec
from engine.parallel.group import Group, Link, Rendezvous


class Connections(NamedTuple):
    """The connections of a rank."""

    group: Group | None  # of its stage; None: it is alone there
    pipeline: Pipeline | None  # to other stages; None: there are none


def connect(rendezvous: Rendezvous, spec: DecoderSpec, dtype: torch.dtype) -> Connections:
    """Meet the other ranks; all ranks do so at once.

    Args:
        rendezvous: of this rank.
        spec: of the model, or of the rank's shard.
        dtype: of its hidden states.

    Raises:
        EngineDead: another rank is gone.
    """
    shard = rendezvous.shard
    group = Group(rendezvous) if shard.size > 1 else None
    pipeline = Pipeline(rendezvous, spec, dtype) if shard.num_stages > 1 else None
    return Connections(group, pipeline)


class Pipeline:
    """This rank's connections to other stages. Made by all ranks at once.

    Args:
        rendezvous: of this rank.
        spec: of the model, or of the rank's shard.
        dtype: of its hidden states.

    Raises:
        EngineDead: here and by every method, when another rank is gone.
    """

    def __init__(self, rendezvous: Rendezvous, spec: DecoderSpec, dtype: torch.dtype) -> None:
        shard = rendezvous.shard
        self._entering_size, self._hidden_size = spec.stage_input_size, spec.hidden_size
        self._dtype, self._device = dtype, rendezvous.device
        self._previous: Link | None = None
        self._next: Link | None = None
        self._result_link: Link | None = None

        def link(name: str, *, sends: bool) -> Link:
            return Link(rendezvous, name, is_sender=sends, max_in_flight=shard.num_stages)

        # In stage order, to avoid a deadlock.
        if shard.stage:
            self._previous = link(f"link-{shard.stage}-{shard.rank}", sends=False)
        if not shard.is_last_stage:
            self._next = link(f"link-{shard.stage + 1}-{shard.rank}", sends=True)
        if not shard.rank and (shard.is_last_stage or not shard.stage):
            self._result_link = link("back", sends=shard.is_last_stage)

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Receive the previous stage's result for the next step: [num_tokens, stage_input_size]."""
        assert self._previous is not None
        return self._previous.receive(self._empty(num_tokens, self._entering_size))

    def send(self, x: torch.Tensor) -> None:
        """Send a step's result to the next stage, or from the last stage to rank 0.

        ``x`` must not be written afterwards.
        """
        link = self._result_link if self._next is None else self._next
        if link is not None and len(x):  # all ranks of the last stage have it; the first sends
            link.send(x)

    def receive_result(self, num_rows: int) -> torch.Tensor:
        """On rank 0, wait for the last stage's result of the oldest step not fetched yet:
        [num_rows, hidden_size]."""
        assert self._result_link is not None
        x = self._empty(num_rows, self._hidden_size)
        return self._result_link.receive(x) if num_rows else x

    def _empty(self, num_rows: int, size: int) -> torch.Tensor:
        return torch.empty((num_rows, size), dtype=self._dtype, device=self._device)
