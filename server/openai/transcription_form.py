"""The form of a transcription request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from engine.audio.languages import code_of
from engine.audio.speech import SpeechTokens
from engine.audio.transcription import LANGUAGES, TranscriptionRules
from server.errors import bad_field, shorten
from server.http.multipart import Form

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_WITH_TIMES = frozenset(("verbose_json", "srt", "vtt"))
_GRANULARITIES = ("timestamp_granularities[]", "timestamp_granularities")
_FIELDS = frozenset(
    {"model", "language", "prompt", "response_format", "temperature", "stream", "seed"}
    | {"max_completion_tokens", *_GRANULARITIES}
)
# Fields that ask for what no model here can give.
_REFUSED = {
    "include[]": "log-probabilities are not available",
    "include": "log-probabilities are not available",
}
_CODE = re.compile(r"[a-z]{2,3}")


class TranscriptionRequest(NamedTuple):
    """POST /v1/audio/transcriptions and /v1/audio/translations."""

    model: str
    language: str | None  # of the speech: its ISO 639 code
    prompt: str
    format: str  # one of ``FORMATS``
    temperature: float
    seed: int | None
    max_tokens: int | None
    stream: bool
    ignored: list[str]  # fields that have no effect
    granularity: str | None  # the field that asks for times

    @property
    def has_times(self) -> bool:
        """Whether the text is wanted with times."""
        return self.format in _WITH_TIMES

    @property
    def is_plain(self) -> bool:
        """Whether the response is not JSON."""
        return self.format in ("text", "srt", "vtt")


def parse_form(form: Form) -> TranscriptionRequest:
    """Parse what a form holds besides the file. Raises ApiError (400)."""
    fields = form.fields
    if form.filename is None:
        raise bad_field("file", "is required")
    if not fields.get("model"):
        raise bad_field("model", "is required")
    for name, reason in _REFUSED.items():
        if fields.get(name):
            raise bad_field(name, f"is not supported: {reason}")
    kind = fields.get("response_format") or "json"
    if kind == "diarized_json":
        raise bad_field("response_format", f"{kind!r} is not available: voices are not told apart")
    if kind not in FORMATS:
        raise bad_field("response_format", f"must be one of {', '.join(FORMATS)}")
    stream = fields.get("stream", "").lower()
    if stream not in ("", "true", "false", "1", "0"):
        raise bad_field("stream", "must be true or false")
    seed = fields.get("seed")
    limit = fields.get("max_completion_tokens")
    return TranscriptionRequest(
        model=fields["model"],
        language=fields.get("language") or None,
        prompt=fields.get("prompt", ""),
        format=kind,
        temperature=_number("temperature", fields.get("temperature") or "0"),
        seed=None if not seed else int(_number("seed", seed, whole=True)),
        max_tokens=None if not limit else int(_number("max_completion_tokens", limit, whole=True)),
        stream=_stream(stream, kind),
        ignored=sorted(set(fields) - _FIELDS),
        granularity=_granularity(fields, kind),
    )


def check_without_times(asked: TranscriptionRequest) -> None:
    """Raise ApiError (400) if a request needs times, for a model that gives none."""
    if asked.granularity is not None:
        raise bad_field(asked.granularity, "is not supported: this model gives no times")
    if asked.has_times:
        problem = f"{asked.format!r} needs times, which this model does not give"
        raise bad_field("response_format", problem)


def language_code(given: str, rules: TranscriptionRules) -> str:
    """Return the code of a language given by its code or English name. Raises ApiError (400)."""
    codes = {name.lower(): code for code, name in LANGUAGES.items()}
    # A region does not matter: de-AT.
    code = codes.get(given.lower(), given.lower().partition("-")[0])
    if not _CODE.fullmatch(code):
        raise bad_field("language", f"is {shorten(given, 40)!r}, no ISO 639 code such as 'en'")
    if rules.needs_name and code not in LANGUAGES:
        known = ", ".join(sorted(LANGUAGES))
        raise bad_field("language", f"is {code!r}; this model knows {known}")
    return code


def speech_language(given: str | None, tokens: SpeechTokens) -> str | None:
    """Return the code of a language that a model knows; None: it is to be detected.

    Raises ApiError (400): it is none of these.
    """
    if given is None:
        return None
    known = [code for code, _ in tokens.languages] or ["en"]
    code = code_of(given)
    if code not in known:
        problem = f"is {shorten(given, 40)!r}; this model knows {', '.join(sorted(known))}"
        raise bad_field("language", problem)
    return code


def _stream(given: str, kind: str) -> bool:
    if given not in ("true", "1"):
        return False
    if kind in _WITH_TIMES:
        raise bad_field("stream", f"is not available with the format {kind!r}")
    return True


def _granularity(fields: Mapping[str, str], kind: str) -> str | None:
    """Return the field that asks for times. Raises ApiError (400): it asks for others than those
    of segments, or the format has none."""
    found: str | None = None
    for name in _GRANULARITIES:
        for asked in filter(None, fields.get(name, "").split(",")):
            if asked == "word":
                raise bad_field(name, "'word' is not supported; times are those of segments")
            if asked != "segment":
                raise bad_field(name, "must be 'segment'")
            found = name
    if found is not None and kind != "verbose_json":
        raise bad_field(found, "needs the response_format 'verbose_json'")
    return found


def _number(field: str, text: str, *, whole: bool = False) -> float:
    """Parse a number; ``SamplingParams`` checks its range."""
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise bad_field(field, f"must be {kind}") from None
