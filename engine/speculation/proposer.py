"""The scheduler's interface to drafting methods, and the choice of one at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.config import SpeculationConfig
from engine.types import DRAFT_TOKEN, Request


class Drafter(Protocol):
    """Drafts tokens for one text."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Draft up to ``most`` tokens; none if there is nothing to go by.

        Args:
            token_ids: the text so far, prompt first; it only grows between calls.
            most: at least 1.
        """
        ...

    def lookup_cost_s(self, num_unseen: int) -> float:
        """Estimated host seconds for the next call, with ``num_unseen`` new tokens."""
        ...


class Proposer(Protocol):
    """A drafting method. No torch: drafts that need the device are made by the runner."""

    def begin(self, request: Request) -> Drafter:
        """Start drafting for this request."""
        ...

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Note that the request has ended with this text, prompt first."""
        ...


class ModelProposer:
    """Leaves the drafting to the runner's draft model or head."""

    def begin(self, request: Request) -> Drafter:
        """Return the proposer itself, since it keeps nothing per text."""
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """As many placeholders as allowed."""
        return (DRAFT_TOKEN,) * most

    def lookup_cost_s(self, num_unseen: int) -> float:
        """Zero: there is no lookup."""
        return 0.0

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Do nothing."""


def make_proposer(config: SpeculationConfig) -> Proposer:
    """Make the configured proposer for one engine."""
    if config.drafts_in_runner:
        return ModelProposer()
    from engine.speculation.ngram import NgramProposer

    lengths = range(config.max_ngram, config.min_ngram - 1, -1)
    if config.method == "ngram":
        return NgramProposer(lengths)
    from engine.speculation.suffix import SuffixProposer

    return SuffixProposer(lengths)
