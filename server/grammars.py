"""Grammars of requests, judged before an answer begins."""

from __future__ import annotations

from engine.grammar.check import GrammarChecker
from engine.types import Grammar
from server.errors import bad_field, cut


class Grammars:
    """What the endpoints know of grammars. Belongs to one event loop."""

    def __init__(self) -> None:
        self._checker: GrammarChecker | None = None  # with the first grammar: its processes start

    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Refuse a grammar that could not be held.

        Raises:
            ApiError: 400 that names ``param``; code ``grammar_timeout`` where the grammar is well
                formed, and takes too much time or memory.
        """
        if self._checker is None:
            self._checker = GrammarChecker()
        refusal = await self._checker.judge(grammar)
        if refusal is not None:
            raise bad_field(
                param, f"cannot be used: {cut(refusal.message, 400)}", code=refusal.code
            )

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._checker is not None:
            self._checker.close()
            self._checker = None
