"""How Whisper writes down speech: its special tokens, and which tokens may follow which.

<|startofprev|> earlier text  <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>  text
                                                                          <|0.00|>  text  <|2.40|>
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SECONDS_PER_STEP = 0.02  # of timestamps


class TimestampRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which texts with timestamps are well formed (Radford et al. 2022).

    A text begins with a timestamp. Timestamps come in pairs, the end of a segment and the beginning
    of the next, except at the end of the text, and do not decrease. A timestamp is due where all
    timestamps together are likelier than any other token, which depends on the logits
    (``engine/sampling/timestamps.py``).
    """

    begin: int  # the token of 0 s; all tokens from here on are timestamps
    text_end: int  # the first special token, which ends a text
    max_initial: int | None = None  # the latest first timestamp, in steps

    def allowed(self, output_ids: Sequence[int]) -> list[tuple[int, int | None]]:
        """Return the ranges [first, end) of tokens that may follow a text; None: no end."""
        if not output_ids:
            latest = None if self.max_initial is None else self.begin + self.max_initial + 1
            return [(self.begin, latest)]
        stamps = [token for token in output_ids if token >= self.begin]
        ends_with_stamp = output_ids[-1] >= self.begin
        is_pair = ends_with_stamp and (len(output_ids) < 2 or output_ids[-2] >= self.begin)
        if is_pair:
            return [(0, self.begin - 1)]
        if not stamps:
            return [(0, self.begin - 1), (self.begin, None)]
        if ends_with_stamp:  # a segment has ended
            return [(self.text_end, self.begin - 1), (stamps[-1], None)]
        return [(0, self.begin - 1), (stamps[-1] + 1, None)]


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens a transcript may have. A part of ``SamplingParams``."""

    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()  # as the first token
    timestamps: TimestampRules | None = None  # None: the text has no timestamps


class SpeechTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The special tokens of a model, from its generation_config.json."""

    start: int  # <|startoftranscript|>
    no_timestamps: int  # the next one is the timestamp of 0 s
    text_end: int
    previous: int | None = None  # <|startofprev|>; None: the model takes no earlier text
    languages: tuple[tuple[str, int], ...] = ()  # by ISO 639 code; empty: the model knows English
    transcribe: int | None = None
    translate: int | None = None  # None: the model does not translate
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()
    max_initial: int | None = None  # the latest first timestamp, in steps
    max_text: int  # tokens of a text in all, the ones before it included

    @property
    def no_speech(self) -> int:
        """``<|nospeech|>``, which comes before ``<|notimestamps|>`` in all vocabularies."""
        return self.no_timestamps - 1

    def without_timestamps(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens of a text that are no timestamps."""
        return [token for token in token_ids if token <= self.no_timestamps]

    def prompt(
        self,
        language: str | None,
        earlier: Sequence[int] = (),
        *,
        translates: bool = False,
        has_timestamps: bool = False,
    ) -> list[int]:
        """Return the tokens that a transcript follows.

        Args:
            language: of the speech, by its code; None only if the model knows no other.
            earlier: tokens of what was said before, of which the last ones are taken.
            translates: whether the text is wanted in English.
            has_timestamps: whether it is wanted with timestamps.
        """
        found: list[int] = []
        if earlier and self.previous is not None:
            most = self.max_text // 2 - 1
            found = [self.previous, *earlier[-most:]]
        found.append(self.start)
        if self.languages:
            assert language is not None
            found.append(dict(self.languages)[language])
            task = self.translate if translates else self.transcribe
            found += [] if task is None else [task]
        return found if has_timestamps else [*found, self.no_timestamps]

    def rules(self, *, has_timestamps: bool) -> SpeechRules:
        """Return the rules of a transcript."""
        stamps = TimestampRules(
            begin=self.no_timestamps + 1, text_end=self.text_end, max_initial=self.max_initial
        )
        return SpeechRules(
            suppressed=self.suppressed,
            begin_suppressed=self.begin_suppressed,
            timestamps=stamps if has_timestamps else None,
        )
