"""Which tokens one request may choose next, as bits on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.grammar.backend import CompiledGrammar, Matcher, MatcherCrew
from engine.types import Request

Bits = np.ndarray  # [ceil(vocab / 32)] int32: bit i % 32 of word i // 32 is token i

_FEW = 8  # words of a line that are looked at one by one in less time than all are changed


class Constraint:
    """What restricts one request, and how far its text has come.

    Restrictions are laid on in this order: the grammar, the allowed tokens, the bans of end-of-text
    tokens (by ``min_tokens``, and by ``ignore_eos`` where a grammar says when to end), the bad
    words. One that would leave nothing to choose is passed over.

    Args:
        request: one that ``applies_to`` is true of.
        output_ids: what it has so far.
        grammar: the compiled form of its own, where it has one.
        eos_token_ids: what ends a text.
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
        self.crew: MatcherCrew | None = None if self.matcher is None else self.matcher.crew
        self._num_unseen = len(output_ids)  # by the matcher
        self._ahead: tuple[int, ...] = ()  # drafts that were judged last
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
        self.follows_output = sampling.follows_output
        self.is_fixed = not self.follows_output and not sampling.min_tokens
        # Whether anything is laid on what the grammar allows.
        self.narrows = bool(
            allowed is not None or sampling.min_tokens or puts_off or sampling.bad_token_ids
        )
        # Whether its mask may wait for the logits: what top_k, top_p and min_p cut off depends on
        # what the mask leaves.
        cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self.may_wait = self.crew is not None and (sampling.temperature == 0.0 or not cuts)
        self._in_vocab = _bits(range(vocab_size), vocab_size)

    @staticmethod
    def applies_to(request: Request) -> bool:
        """Whether the request may not choose every token that its parameters would let it."""
        sampling = request.sampling
        return bool(
            sampling.grammar is not None
            or sampling.allowed_token_ids is not None
            or sampling.bad_token_ids
        )

    def advance(self, start: int, token_ids: Sequence[int]) -> None:
        """Take note of what a row tells: the sequence's tokens from position ``start`` on.

        What lies between them and the last ones that were told are drafts that were kept.
        """
        known = self.num_prompt + len(self._output_ids)
        fresh: Sequence[int] = token_ids
        if start != known:  # a row of a text that went on by one token tells just that
            fresh = [*self._ahead[: max(0, start - known)], *token_ids[max(0, known - start) :]]
        self._output_ids += fresh
        self._num_unseen += len(fresh)

    def follow(self, start: int, token_ids: Sequence[int]) -> Sequence[int]:
        """``advance``, and then ``take_unseen``."""
        if self._num_unseen or start != self.num_prompt + len(self._output_ids):
            self.advance(start, token_ids)
            return self.take_unseen()
        self._output_ids += token_ids
        return token_ids

    def write(self, line: Bits, num_output: int) -> None:
        """Write what may be chosen for the output token with this index.

        Raises:
            GrammarFailed: the text so far is not the grammar's, or it grew past its limits.
        """
        if self.matcher is None:
            line[:] = self._in_vocab
        else:
            unseen = self.take_unseen()
            if unseen:
                self.matcher.accept(unseen)
            self.matcher.fill(line)
        self.narrow(line, num_output)

    def settle(self, line: Bits, num_output: int, candidates: Iterable[int]) -> None:
        """Write, for a text whose mask has waited, what its mask comes to.

        That is the first of some tokens that may be chosen, alone; where none of them may, all that
        may be. A token that every restriction allows shows that none of them leaves nothing.

        Args:
            line: to be written.
            num_output: index of the output token that it is for.
            candidates: in the order in which they would be chosen.

        Raises:
            GrammarFailed: as ``write`` does.
        """
        assert self.matcher is not None
        for token_id in candidates:
            if self._allows(token_id, num_output) and self.matcher.allows(token_id):
                line[:] = 0
                line[token_id // 32] = _BIT[token_id % 32]
                self.matcher.waited(in_vain=False)
                return
        self.matcher.waited(in_vain=True)
        self.write(line, num_output)

    def _allows(self, token_id: int, num_output: int) -> bool:
        """Whether nothing but the grammar may forbid a token; see ``narrow``."""
        if self._allowed is not None and not self._allowed[token_id // 32] & _BIT[token_id % 32]:
            return False
        ends = self._ends if num_output < self._ends_from else self._eos
        if ends is not None and token_id in ends:
            return False
        if self._bad_alone is not None and token_id in self._bad_alone:
            return False
        return not any(ids[-1] == token_id and self._completes(ids) for ids in self._bad)

    def take_unseen(self) -> Sequence[int]:
        """The tokens that the matcher has not been told; it is to be told them now."""
        unseen = self._output_ids[-self._num_unseen :] if self._num_unseen else ()
        self._num_unseen = 0
        return unseen

    def narrow(self, line: Bits, num_output: int) -> None:
        """Lay the other restrictions on a line that holds what the grammar allows."""
        if self._allowed is not None:
            _narrow(line, self._allowed)
        if num_output < self._ends_from:
            self._ends.lay_on(line)
        elif self._eos is not None:
            self._eos.lay_on(line)
        if self._bad_alone is not None:
            self._bad_alone.lay_on(line)
        if self._bad:
            self._ban(line)

    def write_ahead(self, lines: Bits, num_output: int, drafts: Sequence[int]) -> None:
        """Write what may be chosen for the output token with this index, and behind each draft.

        Behind a draft that may not be chosen itself everything may be, and behind the end of the
        text: nobody comes there.

        Args:
            lines: [len(drafts) + 1, ceil(vocab / 32)].
            num_output: index of the output token that the first line is for.
            drafts: guesses of that token and of those behind it.

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
        """Keep bad words of several tokens from being completed."""
        for ids in self._bad:
            if self._completes(ids):
                narrowed = line.copy()
                narrowed[ids[-1] // 32] &= ~_BIT[ids[-1] % 32]
                _narrow(line, narrowed)

    def _completes(self, bad: Sequence[int]) -> bool:
        """Whether nothing but its last token is missing of a bad word."""
        return self._output_ids[1 - len(bad) :] == list(bad[:-1])


class _Ban:
    """Tokens that are not to come."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        self._token_ids = frozenset(token_ids)
        banned = _bits(self._token_ids, vocab_size)
        self._others = ~banned
        self._words = [(int(at), int(banned[at])) for at in np.flatnonzero(banned)]

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._token_ids

    def lay_on(self, line: Bits) -> None:
        """Forbid them. Few tokens are looked for first: most lines allow none of them."""
        if len(self._words) <= _FEW:
            for at, bits in self._words:
                if line.item(at) & bits:
                    break
            else:
                return
        _narrow(line, self._others)


def _narrow(line: Bits, by: Bits) -> None:
    """Forbid in ``line`` what is not in ``by``, if that leaves anything."""
    left = line & by
    if left.any():
        line[:] = left


def _bits(token_ids: Iterable[int], vocab_size: int) -> Bits:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


_BIT = np.array([1 << bit for bit in range(32)], np.uint32).view(np.int32)
