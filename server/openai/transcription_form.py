"""The form of a transcription request."""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.audio.transcription import LANGUAGES, TranscriptionRules
from server.errors import bad_field, shorten
from server.http.multipart import Form

MAX_FORM_BYTES = 2**20  # of a request without the file itself
FORMATS = ("json", "text")
_WITH_TIMES = ("srt", "verbose_json", "vtt", "diarized_json")
_FIELDS = frozenset(
    {"model", "language", "prompt", "response_format", "temperature", "stream", "seed"}
    | {"max_completion_tokens"}
)
# Fields that ask for what no model here can give.
_REFUSED = {
    "timestamp_granularities[]": "times are not available",
    "timestamp_granularities": "times are not available",
    "include[]": "log-probabilities are not available",
    "include": "log-probabilities are not available",
}
_CODE = re.compile(r"[a-z]{2,3}")


class TranscriptionRequest(NamedTuple):
    """POST /v1/audio/transcriptions and /v1/audio/translations."""

    model: str
    language: str | None  # of the speech: its ISO 639 code
    prompt: str
    as_text: bool  # the response is the text alone
    temperature: float
    seed: int | None
    max_tokens: int | None
    stream: bool
    ignored: list[str]  # fields that have no effect


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
    if kind in _WITH_TIMES:
        raise bad_field("response_format", f"{kind!r} needs times, which are not available")
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
        as_text=kind == "text",
        temperature=_number("temperature", fields.get("temperature") or "0"),
        seed=None if not seed else int(_number("seed", seed, whole=True)),
        max_tokens=None if not limit else int(_number("max_completion_tokens", limit, whole=True)),
        stream=stream in ("true", "1"),
        ignored=sorted(set(fields) - _FIELDS),
    )


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


def _number(field: str, text: str, *, whole: bool = False) -> float:
    """Parse a number; ``SamplingParams`` checks its range."""
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise bad_field(field, f"must be {kind}") from None
