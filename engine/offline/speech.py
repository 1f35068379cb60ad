"""Transcripts by the offline ``LLM``, of models that do nothing else (Whisper)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.audio.languages import code_of
from engine.audio.long_form import LongForm, Segment, of_any_length
from engine.audio.read import AudioReader
from engine.audio.speech import SpeechTokens
from engine.audio.types import AudioClip, AudioRules, ProcessedAudio
from engine.driver import Choice, Driver
from engine.errors import InvalidParameter
from engine.offline.images import process_sounds
from engine.offline.inputs import new_id
from engine.requests import fan_out
from engine.text.tokenizer import Tokenizer
from engine.types import Request, SamplingParams


@dataclass(frozen=True)
class SpokenSegment:
    """A stretch of speech."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True)
class Transcript:
    """What was said in a recording."""

    text: str
    language: str  # an ISO 639 code
    segments: list[SpokenSegment]  # empty, unless times were wanted


@dataclass(frozen=True)
class TranscriptionOptions:
    """How recordings are transcribed; see ``LLM.transcribe``."""

    language: str | None = None
    prompt: str = ""
    translate: bool = False
    timestamps: bool = False
    temperature: float = 0.0
    seed: int | None = None


class OfflineSpeech:
    """The transcripts of ``LLM``."""

    _driver: Driver
    _tokenizer: Tokenizer
    _audio_reader: AudioReader

    def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        prompt: str = "",
        translate: bool = False,
        timestamps: bool = False,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> list[Transcript]:
        """Write down what is said in recordings, by a model that only transcribes (Whisper).

        Args:
            audio: one recording or a list of them: paths, the bytes of files, ``data:`` URLs, or
                pairs of samples and their rate.
            language: of all of them, a code or an English name; None: each one's is detected.
            prompt: earlier text.
            translate: write English.
            timestamps: also return segments with their times.
            temperature, seed: as in ``SamplingParams``.

        Raises:
            RequestError: the model does not transcribe so, or a recording is unsuitable.
            RequestFailed: a step failed.
            OSError: a file cannot be read.
        """
        sources = audio if isinstance(audio, list) else [audio]
        options = TranscriptionOptions(language, prompt, translate, timestamps, temperature, seed)
        reader = self._audio_reader
        return transcribe_all(self._driver, self._tokenizer, reader, sources, options)


# Yields requests, is sent the tokens of each, and returns the transcript.
_Run = Generator[Request, list[int], Transcript]


def transcribe_all(
    driver: Driver,
    tokenizer: Tokenizer,
    reader: AudioReader,
    sources: Sequence[Any],
    options: TranscriptionOptions,
) -> list[Transcript]:
    """Transcribe recordings, all of them as one continuous batch.

    Args:
        driver: of the engine.
        tokenizer: the model's.
        reader: decodes files.
        sources: see ``process_sounds``.
        options: for all of them.

    Raises:
        InvalidParameter: the model does not transcribe so, or a recording is unsuitable.
        RequestFailed: a step failed.
        OSError: a file cannot be read.
    """
    rules = driver.core.info.audio
    tokens = None if rules is None else rules.transcription.speech
    if rules is None or tokens is None:
        raise InvalidParameter("this model does not transcribe in this way; see LLM.chat")
    _check(options, tokens)
    results: dict[int, Transcript] = {}
    running: dict[str, tuple[int, _Run]] = {}
    choices: list[Choice] = []

    def submit(number: int, run: _Run, output: list[int] | None) -> None:
        try:
            request = next(run) if output is None else run.send(output)
        except StopIteration as done:
            results[number] = done.value
            return
        running[request.id] = number, run
        choices.extend(driver.submit([request], request.sampling, continuation=True))

    try:
        for number, source in enumerate(sources):
            (sound,) = process_sounds([source], of_any_length(rules), reader)
            submit(number, _run(sound, rules, tokens, tokenizer, options), None)
        while running:
            for choice in driver.step():
                if choice.request.id not in running:
                    continue
                if choice.failure is not None:
                    raise choice.failure.to_error()
                ends = driver.core.info.eos_token_ids
                said = [token for token in choice.token_ids if token not in ends]
                submit(*running.pop(choice.request.id), said)
    finally:
        driver.abort(choices)
    return [results[number] for number in range(len(sources))]


def _check(options: TranscriptionOptions, tokens: SpeechTokens) -> None:
    known = [code for code, _ in tokens.languages] or ["en"]
    if options.language is not None and code_of(options.language) not in known:
        problem = f"is {options.language!r:.40}; this model knows {', '.join(sorted(known))}"
        raise InvalidParameter(f"'language' {problem}", param="language")
    if options.translate and tokens.translate is None:
        raise InvalidParameter("this model does not translate", param="translate")


def _run(
    sound: ProcessedAudio,
    rules: AudioRules,
    tokens: SpeechTokens,
    tokenizer: Tokenizer,
    options: TranscriptionOptions,
) -> _Run:
    """Transcribe one recording, window by window."""
    language = None if options.language is None else code_of(options.language)
    text = options.prompt.strip()
    earlier = tokenizer.encode(" " + text, add_special_tokens=False) if text else []
    speech = LongForm(sound, rules, has_timestamps=options.timestamps)
    params = SamplingParams(
        temperature=options.temperature,
        seed=options.seed,
        speech=tokens.rules(has_timestamps=options.timestamps),
    )
    texts, segments = list[str](), list[SpokenSegment]()
    while (window := speech.next()) is not None:
        if language is None and tokens.languages:
            codes = {token: code for code, token in tokens.languages}
            detect = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=tuple(codes))
            (found,) = yield _request(window.clip, [tokens.start], detect, rules)
            language = codes[found]
        prompt = tokens.prompt(
            language, earlier, translates=options.translate, has_timestamps=options.timestamps
        )
        said = yield _request(window.clip, prompt, params, rules)
        for each in speech.take(said):
            texts.append(heard := _text(each, tokens, tokenizer))
            if options.timestamps and heard.strip():
                segments.append(SpokenSegment(each.start_s, each.end_s, heard.strip()))
    return Transcript("".join(texts).strip(), language or "en", segments)


def _text(segment: Segment, tokens: SpeechTokens, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(tokens.without_timestamps(segment.token_ids), continuation=True)


def _request(
    clip: AudioClip, prompt: Sequence[int], params: SamplingParams, rules: AudioRules
) -> Request:
    ids = [*[rules.token_id] * clip.num_tokens, *prompt]
    (request,) = fan_out(new_id(), ids, params, audio=(clip,))
    return request
