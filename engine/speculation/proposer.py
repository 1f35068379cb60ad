"""What the scheduler knows of a way to guess, and the choice of one at start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.config import SpeculationConfig
from engine.types import DRAFT_TOKEN, Request


class Drafter(Protocol):
    """Guesses for one text."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Tokens that may follow, ``most`` of them or fewer; none if there is nothing to go by.

        Args:
            token_ids: the text so far, prompt first; it only grows from call to call.
            most: at least 1.
        """
        ...

    def look_s(self, num_unseen: int) -> float:
        """About how many seconds of the host the next call takes, so many tokens after the last."""
        ...


class Proposer(Protocol):
    """A way to guess. No torch: what needs the device is proposed by the runner, in its step."""

    def begin(self, request: Request) -> Drafter:
        """Guess for this request from now on."""
        ...

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """The request has ended with this text, prompt first."""
        ...


class ModelProposer:
    """Leaves the guesses to the runner's draft model or head."""

    def begin(self, request: Request) -> Drafter:
        """The proposer itself: there is nothing to remember of a text."""
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """As many as may be."""
        return (DRAFT_TOKEN,) * most

    def look_s(self, num_unseen: int) -> float:
        """Nothing is looked up."""
        return 0.0

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Nothing is kept."""


def make_proposer(config: SpeculationConfig) -> Proposer:
    """The proposer that is asked for, for one engine."""
    if config.in_step:
        return ModelProposer()
    from engine.speculation.ngram import NgramProposer

    lengths = range(config.max_ngram, config.min_ngram - 1, -1)
    if config.method == "ngram":
        return NgramProposer(lengths)
    from engine.speculation.suffix import SuffixProposer

    return SuffixProposer(lengths)
