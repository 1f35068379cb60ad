"""A transcription by a model that does nothing else (Whisper), one window after the other."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import NamedTuple

from engine.audio.languages import language_name
from engine.audio.long_form import LongForm, Segment, Window, of_any_length
from engine.audio.speech import SpeechRules, SpeechTokens
from engine.audio.types import AudioRules
from engine.errors import InvalidParameter
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.output import TextDelta
from engine.types import SamplingParams
from server.access.caller import Caller
from server.errors import ApiError, bad_field
from server.openai.choice import Job
from server.openai.endpoint import new_id
from server.openai.generation import Generation
from server.openai.outputs import to_event
from server.openai.transcript import Transcript
from server.openai.transcript_formats import (
    DurationUsage,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptSegment,
    VerboseTranscription,
    compression_ratio,
)
from server.openai.transcription_form import TranscriptionRequest, speech_language
from server.state import Model, ServerState

# How long a window waits for its turn when the server is at its limit, and how often it asks.
_MAX_WAIT_S = 60.0
_RETRY_S = 0.25
# More than the tokens that are taken of earlier text ever have.
_MAX_EARLIER_CHARS = 8192


class _Piece(NamedTuple):
    """What is certain of the text, and of its segments in formats with times."""

    text: str
    segments: list[TranscriptSegment]


class SpeechCall:
    """One request, ready to be submitted.

    Args:
        state: the application's.
        caller: who sent the request.
        model: it transcribes.
        asked: the request.
        speech: what is heard.
        rules: the model's.
        language: of the speech, by its code; None: the model detects it.
        earlier: tokens of the request's prompt.
        translates: whether the text is wanted in English.
    """

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        asked: TranscriptionRequest,
        speech: LongForm,
        rules: AudioRules,
        language: str | None,
        earlier: list[int],
        *,
        translates: bool,
    ) -> None:
        tokens = rules.transcription.speech
        assert tokens is not None
        self._state = state
        self._caller = caller
        self._model = model
        self._asked = asked
        self._speech = speech
        self._tokens: SpeechTokens = tokens
        self._places = [rules.token_id] * rules.num_tokens(rules.pad_samples)
        self._earlier = earlier
        self._translates = translates
        self._has_timestamps = asked.has_times
        self._id = new_id("transcript")
        self._num_generations = 0
        self._left = asked.max_tokens  # None: no limit
        self._language = language

    @classmethod
    async def prepare(
        cls,
        state: ServerState,
        caller: Caller,
        model: Model,
        asked: TranscriptionRequest,
        data: str,
        *,
        translates: bool,
    ) -> SpeechCall:
        """Decode the file and check the request.

        Args:
            state: the application's.
            caller: who sent the request.
            model: one that only transcribes.
            asked: the request.
            data: the file in base64.
            translates: whether the text is wanted in English.

        Raises:
            ApiError: 400, the model cannot be asked this, or the file cannot be heard.
        """
        rules = model.info.audio
        assert rules is not None
        tokens = rules.transcription.speech
        assert tokens is not None
        language = speech_language(None if translates else asked.language, tokens)
        text = asked.prompt.strip()[-_MAX_EARLIER_CHARS:]
        earlier = model.tokenizer.encode(" " + text, add_special_tokens=False) if text else []
        _sampling(asked, SpeechRules(), asked.max_tokens)  # refused before the file is read
        if asked.max_tokens == 0:
            raise bad_field("max_completion_tokens", "must be at least 1")
        try:
            sound = await state.audio.decode(data, of_any_length(rules))
        except InvalidParameter as error:
            raise bad_field("file", f"cannot be used: {error.message}") from None
        speech = LongForm(sound, rules, has_timestamps=asked.has_times)
        given = state, caller, model, asked, speech, rules, language, earlier
        return cls(*given, translates=translates)

    async def complete(self) -> Transcription | VerboseTranscription:
        """The whole response; in formats with times, verbose JSON."""
        transcript, segments = Transcript(""), list[TranscriptSegment]()
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                transcript.add(piece.text)
                segments += piece.segments
        transcript.end()
        if not self._has_timestamps:
            return Transcription(transcript.text, self._usage)
        for number, segment in enumerate(segments):
            segment.id = number
        return VerboseTranscription(
            task="translate" if self._translates else "transcribe",
            language=language_name(self._language or "en"),
            duration=round(self._speech.duration_s, 3),
            text=transcript.text,
            segments=segments,
            usage=self._usage,
        )

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events, without the closing ``[DONE]``."""
        transcript = Transcript("")
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if shown := transcript.add(piece.text):
                    yield to_event(TranscriptDelta(shown))
        if shown := transcript.end():
            yield to_event(TranscriptDelta(shown))
        yield to_event(TranscriptDone(transcript.text, self._usage))

    async def _pieces(self) -> AsyncGenerator[_Piece]:
        while self._left != 0 and (window := self._speech.next()) is not None:
            if self._language is None and self._tokens.languages:
                self._language = await self._detect(window)
            heard = self._hear_stamped if self._has_timestamps else self._hear
            async with aclosing(heard(window)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _hear(self, window: Window) -> AsyncGenerator[_Piece]:
        """Transcribe a window without times, as the text grows."""
        ids: list[int] = []
        text = IncrementalDetokenizer(self._model.tokenizer, continuation=True)
        async with aclosing(self._generate(window)) as deltas:
            async for delta in deltas:
                new = self._without_end(delta.token_ids)
                ids += new
                if piece := text.push(self._tokens.without_timestamps(new)):
                    yield _Piece(piece, [])
        if rest := text.flush():
            yield _Piece(rest, [])
        self._speech.take(ids)

    async def _hear_stamped(self, window: Window) -> AsyncGenerator[_Piece]:
        """Transcribe a window with times; what comes behind its last segment is heard again."""
        silence = await self._no_speech_probability(window)
        ids: list[int] = []
        logprobs: list[float] = []
        async with aclosing(self._generate(window)) as deltas:
            async for delta in deltas:
                ids += self._without_end(delta.token_ids)
                logprobs += [each.logprob for each in delta.logprobs if each.logprob is not None]
        segments = self._speech.take(ids)
        texts = [self._text(segment) for segment in segments]
        shared = {
            "temperature": self._asked.temperature,
            "avg_logprob": sum(logprobs) / len(logprobs) if logprobs else 0.0,
            "compression_ratio": compression_ratio("".join(texts)),
            "no_speech_prob": silence,
        }
        shown = [
            TranscriptSegment(
                id=0,  # until all are known
                seek=round(segment.window_start_s * 100),
                start=segment.start_s,
                end=segment.end_s,
                text=text,
                tokens=list(segment.token_ids),
                **shared,
            )
            for segment, text in zip(segments, texts, strict=True)
            if text.strip()
        ]
        yield _Piece("".join(texts), shown)

    async def _detect(self, window: Window) -> str:
        """Return the likeliest language of a window."""
        codes = {token: code for code, token in self._tokens.languages}
        chosen = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=tuple(codes))
        (delta,) = [delta async for delta in self._steps(window, [self._tokens.start], chosen)]
        return codes[delta.token_ids[0]]

    async def _no_speech_probability(self, window: Window) -> float:
        """Return how likely the model thinks it that nothing is said in a window."""
        only = (self._tokens.no_speech,)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=only, logprobs=0, ignore_eos=True
        )
        (delta,) = [delta async for delta in self._steps(window, [self._tokens.start], params)]
        logprob = delta.logprobs[0].logprob
        assert logprob is not None
        return math.exp(logprob)

    async def _generate(self, window: Window) -> AsyncGenerator[TextDelta]:
        """Transcribe a window."""
        tokens, stamped = self._tokens, self._has_timestamps
        prompt = tokens.prompt(
            self._language, self._earlier, translates=self._translates, has_timestamps=stamped
        )
        rules = tokens.rules(has_timestamps=stamped)
        params = _sampling(self._asked, rules, self._left, logprobs=0 if stamped else None)
        async with aclosing(self._steps(window, prompt, params)) as deltas:
            async for delta in deltas:
                if self._left is not None:
                    self._left -= len(delta.token_ids)
                yield delta

    async def _steps(
        self, window: Window, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[TextDelta]:
        job = Job([*self._places, *prompt], params, audio=(window.clip,))
        with ExitStack() as stack:
            generation = await self._submit(stack, job)
            async for step in generation.steps():
                for _, delta in step:
                    yield delta

    async def _submit(self, stack: ExitStack, job: Job) -> Generation:
        """Submit a window. One behind the first waits where the server is at its limit."""
        self._num_generations += 1
        id_, waits_until = f"{self._id}-{self._num_generations}", time.monotonic() + _MAX_WAIT_S
        while True:
            given = self._state, self._model, id_, [job]
            is_first = self._num_generations == 1
            generation = Generation(
                *given, caller=self._caller, follows=not is_first, is_followed=True
            )
            try:
                return stack.enter_context(generation)
            except ApiError as error:
                is_full = error.code == "server_is_overloaded"
                if not is_full or is_first or time.monotonic() > waits_until:
                    raise
            await asyncio.sleep(_RETRY_S)

    def _without_end(self, token_ids: Sequence[int]) -> list[int]:
        ends = self._model.info.eos_token_ids
        return [token for token in token_ids if token not in ends]

    def _text(self, segment: Segment) -> str:
        shown = self._tokens.without_timestamps(segment.token_ids)
        return self._model.tokenizer.decode(shown, continuation=True)

    @property
    def _usage(self) -> DurationUsage:
        return DurationUsage(seconds=math.ceil(self._speech.duration_s))


def _sampling(
    asked: TranscriptionRequest,
    rules: SpeechRules,
    max_tokens: int | None,
    logprobs: int | None = None,
) -> SamplingParams:
    """The sampling of one window. Raises InvalidParameter: a value is out of range."""
    return SamplingParams(
        temperature=asked.temperature,
        seed=asked.seed,
        max_tokens=max_tokens,
        speech=rules,
        logprobs=logprobs,
    )
