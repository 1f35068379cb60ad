"""Incremental decoding: token ids in, text out, in time that grows with the new tokens alone."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Decodes one text as its tokens arrive.

    The texts given out, joined, are ``tokenizer.decode`` of all the tokens, however they were
    split: a character is held back until all its bytes are there, and bytes that are no UTF-8
    become U+FFFD where the whole text has it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
        continuation: bool = False,
    ) -> None:
        """Begin a text; ``continuation`` means that it goes on after another one.

        Of the special tokens, ``shown_special_ids`` are never skipped.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._skipped -= shown_special_ids
        self._utf8 = _Utf8Decoder("replace")
        self._is_whole = True  # no unfinished character is held back
        self._lead_left = 0 if continuation else tokenizer.rules.max_lead

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that ``token_ids`` complete."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(id_) for id_ in token_ids if id_ not in skipped])
        text = self._decode(data)
        return self._strip(text) if self._lead_left else text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        self._is_whole = True
        return self._strip(self._utf8.decode(b"", final=True))

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of an unfinished character."""
        return len(self._utf8.getstate()[0])

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token is left out as a special one."""
        return token_id in self._skipped

    def _decode(self, data: bytes) -> str:
        """Characters that ``data`` completes; most tokens are whole ones, for which Python's
        incremental decoder would take several times as long."""
        if self._is_whole:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(data)
        self._is_whole = not self._utf8.getstate()[0]
        return text

    def _strip(self, text: str) -> str:
        lead = self._tokenizer.rules.lead
        while self._lead_left and text:
            if not text.startswith(lead):
                self._lead_left = 0
                break
            text = text.removeprefix(lead)
            self._lead_left -= 1
        return text
