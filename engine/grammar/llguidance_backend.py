"""A grammar backend using llguidance (https://github.com/guidance-ai/llguidance).

The library is written in Rust: a lexer of lazily built automata below an Earley parser. Compiling
takes about a millisecond whatever the vocabulary, and a mask about ten microseconds. So nothing
needs to be precomputed, and a schema takes no memory before it is used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.errors import InvalidParameter
from engine.grammar.backend import BatchMatchResult, GrammarFailed, MatcherRow
from engine.grammar.translate import compile_error, to_llguidance
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Size of a compiled grammar after some use, measured for schemas of a few hundred bytes. The
# automata grow with what texts visit.
_BASE_BYTES = 96 * 1024
_BYTES_PER_CHARACTER = 48
# Token sets precomputed for masks within strings, so that these need not go through the vocabulary.
# A set applies where the grammar allows all of it: if k more characters may follow, the largest set
# with at most k characters does. The library's own sets are up to 10, up to 30 and unbounded; finer
# ones make masks of strings with a ``maxLength`` a quarter cheaper.
_BLANKS = r"[\x20\x0A\x0D\x09]+"
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 14, 30)
_SLICES = [_BLANKS, *(f"{_CHARACTER}{{1,{n}}}" for n in _LENGTHS), f"{_CHARACTER}+"]
# How many more letters fit where masks are expensive. If more fit, most of the vocabulary is
# covered by a precomputed set. If fewer fit, hardly any token does, so many candidates would have
# to be checked.
_MIN_LETTERS, _MAX_LETTERS = 4, 10
_LETTER, _TEXT = re.compile(rb"[a-z]"), re.compile(rb"[A-Za-z\x80-\xFF]")
# How many texts' token ids are cached, and the length limit of such texts.
_KNOWN_TEXTS = 4096
_KNOWN_CHARACTERS = 64
# CPU time that one text's masks may take. An ambiguous grammar costs more with each token, and all
# running sequences wait for it.
_TIME_BUDGET_S = 0.5
_TIME_BUDGET_PER_TOKEN_S = 0.005
# A mask above this is more expensive than checking candidate tokens. With cold CPU caches any mask
# takes half of it.
_EXPENSIVE_MASK_S = 400e-6
# Most masks in a row that are not deferred after deferring was in vain.
_MAX_SKIPPED_DEFERRALS = 31
# Time per row that a batch may take before its rows are timed individually again; below it, no row
# took much more than a token's share.
_TIME_BUDGET_PER_ROW_S = 0.0001


def parser_limits() -> LLParserLimits:
    """Limits of a grammar: about 20 ms of lexer work in a step, and 30 MB of automata."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=20_000, step_max_items=20_000, verbose_errors=False)


class LlguidanceBackend:
    """Compiles grammars for one model. Thread-safe.

    Args:
        tokenizer: the model's.
        vocab_size: number of logits; ids without an entry are never allowed.
        eos_token_ids: tokens that end a text.

    Raises:
        InvalidParameter: the model has no token that ends a text, so a grammar could not end.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        if not eos_token_ids:
            raise InvalidParameter("this model has no end-of-text token, so no text can be held")
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._tokenizer = _library_tokenizer(vocabulary, eos_token_ids)
        self._limits = parser_limits()
        self._batch_matcher = LlguidanceBatchMatcher(vocabulary.tokens)
        self.vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> LlguidanceGrammar:
        """See ``GrammarBackend``."""
        from llguidance import LLMatcher

        text = to_llguidance(grammar)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        # Only the first mask shows whether any text satisfies the grammar. Texts share the automata
        # that are built for it.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise compile_error(first.get_error())
        return LlguidanceGrammar(
            matcher, self._batch_matcher, _BASE_BYTES + _BYTES_PER_CHARACTER * len(text)
        )


class LlguidanceGrammar:
    """See ``CompiledGrammar``."""

    def __init__(
        self, matcher: LLMatcher, batch_matcher: LlguidanceBatchMatcher, num_bytes: int
    ) -> None:
        self._matcher = matcher
        self._batch_matcher = batch_matcher
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """See ``CompiledGrammar``."""
        return self._num_bytes

    def matcher(self) -> LlguidanceMatcher:
        """See ``CompiledGrammar``; the rows of a grammar share its automata."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._batch_matcher)


class LlguidanceMatcher:
    """See ``Matcher``."""

    def __init__(self, matcher: LLMatcher, batch_matcher: LlguidanceBatchMatcher) -> None:
        self.library = matcher
        self.batch_matcher = batch_matcher
        self._time_left_s = _TIME_BUDGET_S
        self.deferral = DeferralPolicy()

    def accept(self, token_ids: Sequence[int]) -> None:
        """See ``Matcher``."""
        begin_s = time.thread_time()
        is_accepted = self.library.consume_tokens(list(token_ids))
        if not is_accepted:
            raise self.failure()
        self._spend(time.thread_time() - begin_s - len(token_ids) * _TIME_BUDGET_PER_TOKEN_S)

    def fill(self, mask: np.ndarray) -> None:
        """See ``Matcher``."""
        begin_s = time.thread_time()
        # ``mask.ctypes`` would take as long as computing the mask of a small vocabulary.
        address: int = mask.__array_interface__["data"][0]
        self.library.unsafe_compute_mask_ptr(address, mask.nbytes)
        if self.library.is_error():
            raise self.failure()
        spent_s = time.thread_time() - begin_s
        self.deferral.record_mask_time(spent_s)
        self._spend(spent_s)

    def allows(self, token_id: int) -> bool:
        """See ``Matcher``."""
        if self.library.validate_tokens([token_id]):
            return True
        if self.library.is_error():
            raise self.failure()
        return False

    def record_deferral(self, *, wasted: bool) -> None:
        """See ``Matcher``."""
        self.deferral.record_deferral(wasted=wasted)

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        if not self.library.rollback(num_tokens):
            raise self.failure()

    @property
    def is_complete(self) -> bool:
        """See ``Matcher``."""
        return self.library.is_stopped()

    def _spend(self, seconds: float) -> None:
        self._time_left_s = min(self._time_left_s - seconds, _TIME_BUDGET_S)
        if self._time_left_s < 0.0:
            raise GrammarFailed("the grammar takes too long to follow this text")

    def failure(self) -> GrammarFailed:
        """Make an exception with the library's error."""
        reason = self.library.get_error().strip().splitlines()
        return GrammarFailed(
            f"the grammar cannot be followed any further: {''.join(reason[:1])[:200]}"
        )


class LlguidanceBatchMatcher:
    """See ``BatchMatcher``: calls the library for row after row, with nothing in between.

    The library's own threads would not help: waking them costs what they save, and the tensor
    library's threads run on the same cores. Rows are not timed individually. If together they take
    too long, each is timed and charged separately until they are fast again.

    Args:
        tokens: the vocabulary's bytes by id.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._is_slow = False
        self._letters = _letters(tokens)
        self._is_text = bytearray(_TEXT.search(each) is not None for each in tokens)

    def advance_and_fill(self, rows: Sequence[MatcherRow], masks: np.ndarray) -> BatchMatchResult:
        """See ``BatchMatcher``."""
        begin_s = time.thread_time()
        step = self._one_by_one(rows, masks) if self._is_slow else self._together(rows, masks)
        spare_s = _TIME_BUDGET_PER_TOKEN_S + len(rows) * _TIME_BUDGET_PER_ROW_S
        self._is_slow = time.thread_time() - begin_s > spare_s
        return step

    def _together(self, rows: Sequence[MatcherRow], masks: np.ndarray) -> BatchMatchResult:
        # ``masks.ctypes`` would take as long as computing the mask of a small vocabulary.
        address: int = masks.__array_interface__["data"][0]
        stride = masks.strides[0]
        is_text = self._is_text
        step = BatchMatchResult({}, [])
        own = cast("Sequence[tuple[LlguidanceMatcher, Sequence[int], int, bool]]", rows)
        for index, (matcher, token_ids, line, may_wait) in enumerate(own):
            library = matcher.library
            if len(token_ids) == 1:
                library.consume_token(token_ids[0])
            elif token_ids:
                library.consume_tokens(list(token_ids))
            if may_wait and token_ids and is_text[token_ids[-1]]:
                if self._should_defer(matcher):
                    step.deferred.append(index)
                    continue
                begin_ns = time.perf_counter_ns()
                library.unsafe_compute_mask_ptr(address + line * stride, stride)
                matcher.deferral.record_mask_time((time.perf_counter_ns() - begin_ns) * 1e-9)
            else:
                library.unsafe_compute_mask_ptr(address + line * stride, stride)
            if library.is_error():  # this also reports errors from consuming tokens
                step.failures[index] = matcher.failure()
        return step

    def _should_defer(self, matcher: LlguidanceMatcher) -> bool:
        """Whether computing the mask would cost more than checking some likely tokens.

        It does if only a limited number of characters fit: the library then examines the prefixes
        of all longer tokens (0.1 to 0.5 ms with 32,000 tokens, where other masks take 10 us). It
        also does if it did the last time, when no precomputed set applies. If the grammar leaves no
        choice, a mask allows one particular tokenisation of what must come, which checking a token
        would not reveal.
        """
        deferral = matcher.deferral
        if not self._letters or not deferral.may_defer():
            return False
        num_fit = matcher.library.validate_tokens(self._letters)
        if not (
            _MIN_LETTERS <= num_fit < _MAX_LETTERS
            or (num_fit == _MAX_LETTERS and deferral.is_expensive)
        ):
            return False
        return not matcher.library.compute_ff_bytes()

    def _one_by_one(self, rows: Sequence[MatcherRow], masks: np.ndarray) -> BatchMatchResult:
        step = BatchMatchResult({}, [])
        for index, (matcher, token_ids, line, _) in enumerate(rows):
            try:
                if token_ids:
                    matcher.accept(token_ids)
                matcher.fill(masks[line])
            except GrammarFailed as error:
                step.failures[index] = error
        return step


class DeferralPolicy:
    """Whether deferring a text's mask is worthwhile, given past costs and results."""

    __slots__ = ("_last_num_skipped", "_num_to_skip", "is_expensive")

    def __init__(self) -> None:
        self.is_expensive = False  # the last mask after text was expensive
        self._num_to_skip = 0  # masks after text still to be computed at once
        self._last_num_skipped = 0  # length of the last such rest

    def record_mask_time(self, seconds: float) -> None:
        """Note the cost of a mask."""
        self.is_expensive = seconds > _EXPENSIVE_MASK_S

    def may_defer(self) -> bool:
        """Whether past results allow deferring; called once for each mask."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return False
        return True

    def record_deferral(self, *, wasted: bool) -> None:
        """Rest twice as long after each deferral in vain, and not at all after a success."""
        self._num_to_skip = self._last_num_skipped = (
            min(2 * self._last_num_skipped + 1, _MAX_SKIPPED_DEFERRALS) if wasted else 0
        )


class _Vocabulary:
    """The tokenizer in the form that the library expects: bytes by id, and text to ids."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(id_) for id_ in range(vocab_size)]
        special = tokenizer.special_ids.union(eos_token_ids)
        self.special_token_ids = sorted(id_ for id_ in special if id_ < vocab_size)
        self.fallback: LLTokenizer | None = None
        self._known_ids = lru_cache(_KNOWN_TEXTS)(self._ids)

    def __call__(self, text: str) -> Sequence[int]:
        """The token ids of a text within another one, as the model would write it.

        Tokens that the tokenizer puts before a separate text are removed. If these cannot be told
        apart, the text is tokenised greedily with the longest tokens.

        The library calls this at each token of a text that the grammar fully determines, such as a
        property name. There are few such texts, and their remainders recur, so results are cached.
        """
        return self._known_ids(text) if len(text) <= _KNOWN_CHARACTERS else self._ids(text)

    def _ids(self, text: str) -> Sequence[int]:
        encode, wanted = self._tokenizer.encode, text.encode()
        for lead in ("", "\x02"):
            before = encode(lead, add_special_tokens=False) if lead else []
            ids = encode(lead + text, add_special_tokens=False)
            if ids[: len(before)] == before:
                ids = ids[len(before) :]
                if b"".join(self.tokens[id_] for id_ in ids) == wanted:
                    return ids
        return self.fallback.greedy_tokenize(text) if self.fallback is not None else []


def _library_tokenizer(vocabulary: _Vocabulary, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(vocabulary)
    made = LLTokenizer(wrapper, eos_token=list(eos_token_ids), slices=_SLICES)
    vocabulary.fallback = made
    return made


def _letters(tokens: Sequence[bytes]) -> list[int]:
    """A single-letter token, repeated ``_MAX_LETTERS`` times; empty if there is none."""
    letter = next((id_ for id_, each in enumerate(tokens) if _LETTER.fullmatch(each)), None)
    return [] if letter is None else [letter] * _MAX_LETTERS
