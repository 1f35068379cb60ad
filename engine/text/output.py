"""Converts an engine's tokens to the text, logprobs and finish reason that a client sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stops import StopMatcher
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason, RequestOutput, SamplingParams, TokenLogprobs


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One likely token at a position."""

    token_id: int
    token: str  # U+FFFD if it is a part of a character
    data: bytes  # its exact bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token as reported to a client."""

    token_id: int
    token: str  # U+FFFD if it is a part of a character
    data: bytes  # its exact bytes
    logprob: float | None  # None: unknown, as for a prompt's first token
    rank: int | None  # 1 for the most likely token
    top: tuple[TopLogprob, ...]  # descending, as many as requested
    text_offset: int  # number of characters before the first one that this token contributes to
    visible: bool  # whether it is part of the text; the token or stop string that ended it is not


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one push adds to a choice."""

    text: str = ""
    # As generated. Text that is held back comes later than its tokens.
    token_ids: tuple[int, ...] = ()
    # Those whose text is out by now, each once and in order; the last delta has all that remain.
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    # A stop string or an id of stop_token_ids that ended the choice; None for eos and other
    # reasons.
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last delta."""
        return self.finish_reason is not None


class OutputDecoder:
    """Converts one request's outputs to text deltas, however the outputs are split.

    When a stop string is found, the delta is final although the engine does not know about it, and
    the caller must abort the request. Tokens after the one that completed the stop string are
    dropped, so the text and the token count do not depend on how far ahead the engine was.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        continuation: bool = False,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a choice.

        Args:
            tokenizer: the model's.
            sampling: the request's.
            continuation: the text continues the prompt's, as in completions, so keep the space
                before its first word (see ``Tokenizer.decode``).
            shown_special_ids: special tokens that are shown whatever the request says.
        """
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            shown_special_ids=shown_special_ids,
            continuation=continuation,
        )
        self._matcher: StopMatcher | None = None
        self._stop_tokens: dict[int, str] = {}  # stop strings that are tokens without a text
        self._stop_token: str | None = None  # the one of them that ended the choice
        if sampling.stop:
            include = sampling.include_stop_str_in_output
            self._matcher = StopMatcher(sampling.stop, include_stop=include)
            ids = {tokenizer.special_id(stop): stop for stop in sampling.stop}
            self._stop_tokens = {
                id_: stop
                for id_, stop in ids.items()
                if id_ is not None and self._detokenizer.is_skipped(id_)
            }
        self._num_decoded = 0  # characters decoded, including those held back
        self._num_emitted = 0  # characters returned
        self._pending_logprobs: deque[tuple[TokenLogprob, int]] = deque()  # and release lengths
        self.num_tokens = 0  # tokens in this choice's output
        self.finished = False

    def push(self, output: RequestOutput) -> TextDelta:
        """What ``output`` adds; nothing once the choice has finished."""
        if self.finished:
            return TextDelta()
        token_ids = output.token_ids
        is_plain = self._matcher is None and self._sampling.logprobs is None
        if is_plain and output.finish_reason is None:  # nearly all outputs of a busy server
            text = self._detokenizer.push(token_ids)
            self.num_tokens += len(token_ids)
            return TextDelta(text=text, token_ids=token_ids)
        if is_plain:
            shown = len(token_ids) - self._is_hidden_stop(output)
            text = self._detokenizer.push(token_ids[:shown])
        else:
            text, num_tokens = self._push_each(output)
            token_ids = token_ids[:num_tokens]
        self.num_tokens += len(token_ids)
        matched = self._matched
        if matched is None and output.finish_reason is not None:
            text += self._flush()
            matched = self._matched
        self._num_emitted += len(text)

        finish_reason: FinishReason | None = output.finish_reason
        stop_reason: str | int | None = None
        if matched is not None:
            finish_reason, stop_reason = "stop", matched
        elif output.stop_token_id in self._sampling.stop_token_ids:
            stop_reason = output.stop_token_id
        self.finished = finish_reason is not None
        return TextDelta(
            text=text,
            token_ids=token_ids,
            logprobs=self._release(),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    @property
    def _matched(self) -> str | None:
        if self._stop_token is not None or self._matcher is None:
            return self._stop_token
        return self._matcher.matched

    def _is_hidden_stop(self, output: RequestOutput) -> bool:
        """Whether the last token ended the choice and is not part of its text."""
        stop_id = output.stop_token_id
        if stop_id is None:
            return False
        sampling = self._sampling
        return not (sampling.include_stop_str_in_output and stop_id in sampling.stop_token_ids)

    def _push_each(self, output: RequestOutput) -> tuple[str, int]:
        """Push tokens one by one until a stop string; returns the text and the tokens used."""
        texts: list[str] = []
        token_ids = output.token_ids
        shown = len(token_ids) - self._is_hidden_stop(output)
        wanted = self._sampling.logprobs is not None
        logprobs = output.logprobs if wanted and output.logprobs is not None else ()
        detokenizer = self._detokenizer
        for index, token_id in enumerate(token_ids):
            is_shown = index < shown
            offset = self._num_decoded
            if is_shown:
                offset += detokenizer.num_chars_before(token_id)
            else:
                offset += detokenizer.num_pending_chars
            text = detokenizer.push((token_id,)) if is_shown else ""
            self._num_decoded += len(text)
            if index < len(logprobs):
                end = self._num_decoded + detokenizer.num_pending_chars
                visible = is_shown and not detokenizer.is_skipped(token_id)
                entry = _entry(self._tokenizer, token_id, logprobs[index], offset, visible)
                self._pending_logprobs.append((entry, end))
            if self._matcher is not None and self.num_tokens + index >= self._sampling.min_tokens:
                text = self._matcher.push(text)
                if is_shown and token_id in self._stop_tokens:
                    text += self._end_at(token_id)
            texts.append(text)
            if self._matched is not None:
                return "".join(texts), index + 1
        return "".join(texts), len(token_ids)

    def _end_at(self, token_id: int) -> str:
        """End the choice at a stop string that is this token; returns the text held back."""
        held = self._flush()
        if self._matched is not None:
            return held
        self._stop_token = stop = self._stop_tokens[token_id]
        return held + stop if self._sampling.include_stop_str_in_output else held

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        text = self._matcher.push(text)
        return text + self._matcher.flush()

    def _release(self) -> tuple[TokenLogprob, ...]:
        """The entries whose text is out; all of them at the end."""
        if not self._pending_logprobs:
            return ()
        waiting = self._pending_logprobs
        entries: list[TokenLogprob] = []
        while waiting and (self.finished or waiting[0][1] <= self._num_emitted):
            entry, end = waiting.popleft()
            # One without any text of its own stays: it may have been released before the match.
            is_cut = entry.text_offset >= self._num_emitted and end > self._num_emitted
            if self._matched is not None and entry.visible and is_cut:
                entry = msgspec.structs.replace(entry, visible=False)
            entries.append(entry)
        return tuple(entries)


def prompt_entries(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] = (),
    *,
    skip_special_tokens: bool = True,
) -> list[TokenLogprob]:
    """The prompt's tokens as entries, the first one without a logprob.

    Args:
        tokenizer: the model's.
        prompt_token_ids: the whole prompt.
        logprobs: those of positions 1 and on; if empty, every logprob is None.
        skip_special_tokens: whether the text that offsets refer to omits special tokens.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    entries: list[TokenLogprob] = []
    offset = 0
    for index, token_id in enumerate(prompt_token_ids):
        entry = logprobs[index - 1] if 0 < index <= len(logprobs) else None
        visible = not detokenizer.is_skipped(token_id)
        begin = offset + detokenizer.num_chars_before(token_id)
        entries.append(_entry(tokenizer, token_id, entry, begin, visible))
        offset += len(detokenizer.push((token_id,)))
    return entries


def _entry(
    tokenizer: Tokenizer, token_id: int, told: TokenLogprobs | None, offset: int, visible: bool
) -> TokenLogprob:
    text, data = tokenizer.token_text, tokenizer.token_bytes
    top: tuple[TopLogprob, ...] = ()
    if told is not None:
        pairs = zip(told.top_ids, told.top_logprobs, strict=True)
        top = tuple(TopLogprob(id_, text(id_), data(id_), logprob) for id_, logprob in pairs)
    return TokenLogprob(
        token_id=token_id,
        token=text(token_id),
        data=data(token_id),
        logprob=None if told is None else told.logprob,
        rank=None if told is None else told.rank,
        top=top,
        text_offset=offset,
        visible=visible,
    )
