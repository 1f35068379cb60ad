"""The engine's interface to a grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.types import Grammar

if TYPE_CHECKING:  # numpy is not needed in API processes
    import numpy as np


class Matcher(Protocol):
    """The state of one text within a grammar."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens.

        Raises:
            GrammarFailed: a token is not allowed here, or the grammar grew past its limits.
        """
        ...

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next.

        End-of-text tokens are included where the text may end, and alone where it must.

        Args:
            mask: [ceil(vocab / 32)] int32, contiguous; bit ``i % 32`` of word ``i // 32`` is set if
                token i is allowed.

        Raises:
            GrammarFailed: the grammar grew past its limits.
        """
        ...

    def allows(self, token_id: int) -> bool:
        """Whether a token may come next, for a text whose mask was deferred; agrees with its mask.

        Raises:
            GrammarFailed: the text cannot be followed any further.
        """
        ...

    def record_deferral(self, *, wasted: bool) -> None:
        """Note whether deferring the mask was in vain, or some candidate was allowed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` tokens."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text has ended: only an end-of-text token may follow."""
        ...

    @property
    def batch_matcher(self) -> BatchMatcher | None:
        """What can advance this text together with others; None: it is advanced by itself."""
        ...


# A text, the tokens to advance it by, the line of its mask, and whether the mask may be deferred
# until the model's preferred tokens are known. A plain tuple, because there is one for each row of
# each step.
MatcherRow = tuple[Matcher, Sequence[int], int, bool]


class BatchMatchResult(NamedTuple):
    """The result for a batch of rows, by index."""

    failures: dict[int, GrammarFailed]  # rows that cannot continue; their lines are meaningless
    deferred: list[int]  # rows whose masks are deferred, as checking a few tokens is cheaper


class BatchMatcher(Protocol):
    """Advances several texts at once, which is cheaper than one by one."""

    def advance_and_fill(self, rows: Sequence[MatcherRow], masks: np.ndarray) -> BatchMatchResult:
        """Advance by the rows' tokens and write their masks, as ``Matcher`` does for one text.

        Args:
            rows: their matchers belong to this batch matcher.
            masks: [lines, ceil(vocab / 32)] int32, contiguous.
        """
        ...


class CompiledGrammar(Protocol):
    """A grammar compiled against a vocabulary. Immutable; shared by rows and threads."""

    @property
    def num_bytes(self) -> int:
        """Its approximate memory use."""
        ...

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar. This may take long; other threads can run meanwhile.

        Raises:
            InvalidParameter: it is malformed, has unsupported features, is too large, or no text
                satisfies it.
        """
        ...


class GrammarFailed(Exception):
    """A grammar cannot be followed any further. The message is meant for the client."""
