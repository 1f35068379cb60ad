"""What the engine knows of a library that holds texts to grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.types import Grammar

if TYPE_CHECKING:  # the client's side of the boundary does without it
    import numpy as np


class Matcher(Protocol):
    """How far one text has come in a grammar."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens.

        Raises:
            GrammarFailed: one of them is not allowed here, or the grammar grew past its limits.
        """
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next; those that end a text are among them where it may end,
        and alone where it must.

        Args:
            mask: [ceil(vocab / 32)] int32, contiguous; bit ``i % 32`` of word ``i // 32`` is set
                where token i is allowed.

        Raises:
            GrammarFailed: the grammar grew past its limits.
        """
        ...

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next, of a text that a crew has let wait: as its mask says.

        Raises:
            GrammarFailed: the text cannot be followed any further.
        """
        ...

    def waited(self, *, in_vain: bool) -> None:
        """Take note of what waiting came to: a token that is allowed, or a mask after all."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the tokens accepted last."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text has ended: nothing but an end-of-text token may follow."""
        ...

    @property
    def crew(self) -> MatcherCrew | None:
        """Those who follow this text together with others; None: each goes by itself."""
        ...


# A text that goes on by some tokens, the line of its mask then, and whether its mask may wait until
# the model has said what it would choose without. A plain tuple: there is one for each row of each
# step.
Followed = tuple[Matcher, Sequence[int], int, bool]


class CrewStep(NamedTuple):
    """What became of a crew's rows, by their indices."""

    failures: dict[int, GrammarFailed]  # why a row cannot go on; its line means nothing
    waiting: list[int]  # rows whose mask is not written: it costs more than asking for some tokens


class MatcherCrew(Protocol):
    """Follows several texts at once, which costs less than one by one."""

    def follow(self, rows: Sequence[Followed], masks: np.ndarray) -> CrewStep:
        """Go on by the rows' tokens, and write which may come next, as ``Matcher`` does for one.

        Args:
            rows: their matchers belong to this crew.
            masks: [lines, ceil(vocab / 32)] int32, contiguous.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar against a vocabulary. Shared by rows and threads; changed by nobody."""

    @property
    def num_bytes(self) -> int:
        """What it costs to keep, roughly."""
        ...

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar; may take long, and lets other threads run meanwhile.

        Raises:
            InvalidParameter: it is malformed, asks for what cannot be held, or is too large.
        """
        ...


class GrammarFailed(Exception):
    """A grammar cannot be followed any further; the message is for the client."""
