"""The text of a transcription as it grows."""

from __future__ import annotations


class Transcript:
    """The text as it grows, without surrounding spaces and what comes before ``marker``."""

    def __init__(self, marker: str) -> None:
        self.text = ""
        self._marker = marker
        self._held = ""

    def add(self, new: str) -> str:
        """Add what was generated; return what of it is certain."""
        self._held += new
        if self._marker:
            _, found, behind = self._held.partition(self._marker)
            if not found:
                return ""
            self._marker, self._held = "", behind
        return self._take(len(self._held.rstrip()))

    def end(self) -> str:
        """Return what is left. Without a marker, everything is the text."""
        self._marker, self._held = "", self._held.rstrip()
        return self._take(len(self._held))

    def _take(self, length: int) -> str:
        piece, self._held = self._held[:length], self._held[length:]
        piece = piece if self.text else piece.lstrip()
        self.text += piece
        return piece
