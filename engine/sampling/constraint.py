"""Which tokens a request may sample next, as bits on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.audio.speech import SpeechRules
from engine.grammar.backend import BatchMatcher, CompiledGrammar, Matcher
from engine.types import Request

Bits = np.ndarray  # [ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is token i

# Up to so many words are checked one by one before a whole line is rewritten.
_MAX_CHECKED_WORDS = 8


class Constraint:
    """The restrictions of one request, and its text so far.

    Restrictions apply in this order: the grammar, the allowed tokens, bans of end-of-text tokens
    (by ``min_tokens``, and by ``ignore_eos`` where a grammar decides the end), the bad words, the
    rules of transcripts. A restriction that would leave no token is skipped.

    Args:
        request: one for which ``applies_to`` is true.
        output_ids: its output so far.
        grammar: its compiled grammar, if it has one.
        eos_token_ids: tokens that end a text.
        vocab_size: of the model.
    """

    def __init__(
        self,
        request: Request,
        output_ids: Sequence[int],
        grammar: CompiledGrammar | None,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
    ) -> None:
        sampling = request.sampling
        self.num_prompt = len(request.prompt_token_ids)
        self._output_ids = list(output_ids)
        self.matcher: Matcher | None = None if grammar is None else grammar.matcher()
        self.batch_matcher: BatchMatcher | None = (
            None if self.matcher is None else self.matcher.batch_matcher
        )
        self._num_unseen = len(output_ids)  # by the matcher
        self._ahead: tuple[int, ...] = ()  # the drafts judged last
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else _bits(allowed, vocab_size)
        eos = () if sampling.ignore_eos and grammar is None else eos_token_ids
        self._ends = _Ban((*sampling.stop_token_ids, *eos), vocab_size)
        self._ends_from = sampling.min_tokens
        puts_off = sampling.ignore_eos and grammar is not None
        self._eos = _Ban(eos_token_ids, vocab_size) if puts_off else None
        self._bad = [ids for ids in sampling.bad_token_ids if len(ids) > 1]
        single = [ids[0] for ids in sampling.bad_token_ids if len(ids) == 1]
        self._bad_alone = _Ban(single, vocab_size) if single else None
        self._speech = None if sampling.speech is None else _Speech(sampling.speech, vocab_size)
        # The first timestamp, if one is due wherever all of them are likelier than any other token.
        self.timestamp_begin = None if self._speech is None else self._speech.timestamp_begin
        self.depends_on_output = sampling.depends_on_output
        self.is_fixed = not (
            self.depends_on_output or sampling.min_tokens or sampling.speech is not None
        )
        # Whether it restricts further what the grammar allows.
        self.has_other_restrictions = bool(
            allowed is not None
            or sampling.min_tokens
            or puts_off
            or sampling.bad_token_ids
            or sampling.speech is not None
        )
        # Whether the mask may be computed after the logits. It may not where top_k, top_p or min_p
        # select among the tokens that the mask leaves.
        cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self.can_defer = self.batch_matcher is not None and (
            sampling.temperature == 0.0 or not cuts
        )
        self._in_vocab = _bits(range(vocab_size), vocab_size)

    @staticmethod
    def applies_to(request: Request) -> bool:
        """Whether the request needs a mask."""
        sampling = request.sampling
        return bool(
            sampling.grammar is not None
            or sampling.allowed_token_ids is not None
            or sampling.bad_token_ids
            or sampling.speech is not None
        )

    def advance(self, start: int, token_ids: Sequence[int]) -> None:
        """Update the text with a row's tokens, which begin at position ``start``.

        Tokens between these and the last known ones are drafts that were accepted.
        """
        known = self.num_prompt + len(self._output_ids)
        fresh: Sequence[int] = token_ids
        if start != known:  # a row of a text that grew by one token contains just that
            fresh = [*self._ahead[: max(0, start - known)], *token_ids[max(0, known - start) :]]
        self._output_ids += fresh
        self._num_unseen += len(fresh)

    def advance_unseen(self, start: int, token_ids: Sequence[int]) -> Sequence[int]:
        """``advance``, then ``take_unseen``."""
        if self._num_unseen or start != self.num_prompt + len(self._output_ids):
            self.advance(start, token_ids)
            return self.take_unseen()
        self._output_ids += token_ids
        return token_ids

    def write(self, line: Bits, num_output: int) -> None:
        """Write the mask for output token ``num_output``.

        Raises:
            GrammarFailed: the text so far violates the grammar, or it grew past its limits.
        """
        if self.matcher is None:
            line[:] = self._in_vocab
        else:
            unseen = self.take_unseen()
            if unseen:
                self.matcher.accept(unseen)
            self.matcher.fill(line)
        self.apply_restrictions(line, num_output)

    def write_deferred(self, line: Bits, num_output: int, candidates: Iterable[int]) -> None:
        """Write the mask of a row that has waited for its logits.

        It allows only the first candidate that may be sampled, or, if no candidate may be, all
        allowed tokens. A token that passes every restriction proves that none of these had to be
        skipped.

        Args:
            line: written.
            num_output: index of the output token that the mask is for.
            candidates: tokens in the order in which they would be sampled.

        Raises:
            GrammarFailed: as ``write`` does.
        """
        assert self.matcher is not None
        for token_id in candidates:
            if self._allows(token_id, num_output) and self.matcher.allows(token_id):
                line[:] = 0
                line[token_id // 32] = _BIT[token_id % 32]
                self.matcher.record_deferral(wasted=False)
                return
        self.matcher.record_deferral(wasted=True)
        self.write(line, num_output)

    def _allows(self, token_id: int, num_output: int) -> bool:
        """Whether the restrictions other than the grammar allow a token; see
        ``apply_restrictions``."""
        if self._allowed is not None and not self._allowed[token_id // 32] & _BIT[token_id % 32]:
            return False
        ends = self._ends if num_output < self._ends_from else self._eos
        if ends is not None and token_id in ends:
            return False
        if self._bad_alone is not None and token_id in self._bad_alone:
            return False
        return not any(ids[-1] == token_id and self._completes(ids) for ids in self._bad)

    def take_unseen(self) -> Sequence[int]:
        """The tokens that the matcher has not seen; the caller passes them to it now."""
        unseen = self._output_ids[-self._num_unseen :] if self._num_unseen else ()
        self._num_unseen = 0
        return unseen

    def apply_restrictions(self, line: Bits, num_output: int) -> None:
        """Apply the other restrictions to a line that holds what the grammar allows."""
        if self._allowed is not None:
            _intersect(line, self._allowed)
        if num_output < self._ends_from:
            self._ends.apply(line)
        elif self._eos is not None:
            self._eos.apply(line)
        if self._bad_alone is not None:
            self._bad_alone.apply(line)
        if self._bad:
            self._ban(line)
        if self._speech is not None:
            self._speech.apply(line, num_output, self._output_ids)

    def write_ahead(self, lines: Bits, num_output: int, drafts: Sequence[int]) -> None:
        """Write the masks for output token ``num_output`` and after each draft.

        After a draft that is not allowed itself, and after the end of the text, everything is
        allowed, since no token is sampled there.

        Args:
            lines: [len(drafts) + 1, ceil(vocab / 32)].
            num_output: index of the output token that the first line is for.
            drafts: drafts of that token and of those after it.

        Raises:
            GrammarFailed: as ``write`` does.
        """
        self._ahead = tuple(drafts)
        num_taken = 0
        lines[:] = self._in_vocab
        try:
            for index, line in enumerate(lines):
                self.write(line, num_output + index)
                if index == len(drafts) or not line[drafts[index] // 32] & _BIT[drafts[index] % 32]:
                    break
                if self.matcher is not None:
                    if self.matcher.is_complete:
                        break
                    self.matcher.accept(drafts[index : index + 1])
                self._output_ids.append(drafts[index])
                num_taken += 1
        finally:
            if num_taken:
                del self._output_ids[-num_taken:]
                if self.matcher is not None:
                    self.matcher.rollback(num_taken)

    def _ban(self, line: Bits) -> None:
        """Ban the last tokens of bad words whose other tokens have just been sampled."""
        for ids in self._bad:
            if self._completes(ids):
                narrowed = line.copy()
                narrowed[ids[-1] // 32] &= ~_BIT[ids[-1] % 32]
                _intersect(line, narrowed)

    def _completes(self, bad: Sequence[int]) -> bool:
        """Whether only its last token is missing from a bad word."""
        return self._output_ids[1 - len(bad) :] == list(bad[:-1])


class _Speech:
    """The rules of a transcript; see ``engine/audio/speech.py``."""

    def __init__(self, rules: SpeechRules, vocab_size: int) -> None:
        self._suppressed = _Ban(rules.suppressed, vocab_size)
        self._at_begin = _Ban(rules.begin_suppressed, vocab_size)
        self._stamps = rules.timestamps
        self._vocab_size = vocab_size
        self.timestamp_begin = None if rules.timestamps is None else rules.timestamps.begin

    def apply(self, line: Bits, num_output: int, output_ids: Sequence[int]) -> None:
        """Apply them; ``output_ids`` are known if there may be timestamps."""
        self._suppressed.apply(line)
        if not num_output:
            self._at_begin.apply(line)
        if self._stamps is not None:
            flags = np.zeros(line.size * 32, np.uint8)
            for first, end in self._stamps.allowed(output_ids):
                flags[first : self._vocab_size if end is None else end] = 1
            _intersect(line, _packed(flags))


class _Ban:
    """A set of banned tokens."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._token_ids = frozenset(token_ids)
        banned = _bits(self._token_ids, vocab_size)
        self._others = ~banned
        self._words = [(int(at), int(banned[at])) for at in np.flatnonzero(banned)]

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._token_ids

    def apply(self, line: Bits) -> None:
        """Apply the ban. If it has few words these are checked first, as most lines allow none."""
        if len(self._words) <= _MAX_CHECKED_WORDS:
            for at, bits in self._words:
                if line.item(at) & bits:
                    break
            else:
                return
        _intersect(line, self._others)


def _intersect(line: Bits, by: Bits) -> None:
    """Intersect ``line`` with ``by``, unless that leaves nothing."""
    left = line & by
    if left.any():
        line[:] = left


def _bits(token_ids: Iterable[int], vocab_size: int) -> Bits:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return _packed(flags)


def _packed(flags: np.ndarray) -> Bits:
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


_BIT = np.array([1 << bit for bit in range(32)], np.uint32).view(np.int32)
