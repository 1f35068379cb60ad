"""Incremental decoding of token ids to text, in time proportional to the new tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Decodes one text as its tokens arrive.

    The pieces returned, joined, equal ``tokenizer.decode`` of all tokens, however these were split.
    A character is held back until all its bytes have arrived, and invalid UTF-8 becomes U+FFFD
    exactly where it does in the whole text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_special_ids: frozenset[int] = frozenset(),
        continuation: bool = False,
    ) -> None:
        """Begin a text; ``continuation`` means that it continues another one.

        The special tokens in ``shown_special_ids`` are never skipped.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._skipped -= shown_special_ids
        self._utf8 = _Utf8Decoder("replace")
        self._is_char_complete = True  # no incomplete character is held back
        self._lead_left = 0 if continuation else tokenizer.rules.max_lead

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that they complete."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        data = b"".join([token_bytes(id_) for id_ in token_ids if id_ not in skipped])
        text = self._decode(data)
        return self._strip(text) if self._lead_left else text

    def flush(self) -> str:
        """The rest of the text: U+FFFD for a character that was never completed."""
        self._is_char_complete = True
        return self._strip(self._utf8.decode(b"", final=True))

    @property
    def num_pending_chars(self) -> int:
        """The number of U+FFFD that the bytes of an incomplete character become if it ends here."""
        return len(self._utf8.getstate()[0].decode(errors="replace"))

    def num_chars_before(self, token_id: int) -> int:
        """How many characters of the next ``push`` precede the first that ``token_id`` is part of.

        They are U+FFFD for pending bytes that the token's first byte does not continue.
        """
        if self._is_char_complete or self.is_skipped(token_id):
            return 0
        first = self._tokenizer.token_bytes(token_id)[:1]
        if not first:
            return 0
        # The last character is the one that holds the first byte, whatever follows it.
        return len((self._utf8.getstate()[0] + first).decode(errors="replace")) - 1

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token is omitted as a special one."""
        return token_id in self._skipped

    def _decode(self, data: bytes) -> str:
        """The characters that ``data`` completes.

        Most tokens consist of whole characters; for these Python's incremental decoder would take
        several times as long.
        """
        if self._is_char_complete:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(data)
        self._is_char_complete = not self._utf8.getstate()[0]
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
