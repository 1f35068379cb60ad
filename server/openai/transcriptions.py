"""POST /v1/audio/transcriptions and /v1/audio/translations.

A model that hears answers as in a chat, with the prompt that it was trained to transcribe with: see
``engine/audio/transcription.py``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from engine.audio.transcription import TranscriptionRules
from engine.errors import RequestError
from server.access.caller import Caller, caller_of
from server.errors import ApiError, bad_field
from server.http.disconnect import until_disconnect
from server.http.multipart import Form, read_form
from server.openai.conversation import Conversation
from server.openai.deadline import caller_with_deadline, until_deadline
from server.openai.endpoint import serve_call, state_of
from server.openai.generation import Generation
from server.openai.inputs import ChatRequest
from server.openai.openapi_schema import Description, describe
from server.openai.outputs import to_event
from server.openai.speech_call import SpeechCall
from server.openai.transcript import Transcript
from server.openai.transcript_formats import (
    InputTokenDetails,
    TokenUsage,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    VerboseTranscription,
    to_srt,
    to_vtt,
)
from server.openai.transcription_form import (
    FORMATS,
    TranscriptionRequest,
    check_without_times,
    language_code,
    parse_form,
)
from server.openai.unsupported import report_ignored
from server.state import ServerState
from server.store.database import StoreError, reason_of
from server.text.parts import Text

router = APIRouter()


def _describe(*, translates: bool) -> Description:
    """Describe the form, which is read here and not by FastAPI."""
    description = describe(
        None,
        Transcription | VerboseTranscription,
        chunk=TranscriptDelta | TranscriptDone,
        errors=(404, 504),
    )
    properties: dict[str, Any] = {
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"type": "string", "enum": list(FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "seed": {"type": "integer"},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "stream": {"type": "boolean"},
        "timestamp_granularities[]": {"type": "array", "items": {"type": "string"}},
    }
    if not translates:
        properties["language"] = {"type": "string"}
    form = {"type": "object", "required": ["file", "model"], "properties": properties}
    content = {"multipart/form-data": {"schema": form}}
    description["requestBody"] = {"required": True, "content": content}
    plain = {"schema": {"type": "string"}}
    description["responses"]["200"]["content"]["text/plain"] = plain
    return description


@router.post(
    "/v1/audio/transcriptions",
    summary="Write down speech",
    openapi_extra=_describe(translates=False),
)
async def create_transcription(request: Request) -> Response:
    """Transcribe an audio file, whole or as a stream of pieces."""
    return await _respond(request, translates=False)


@router.post(
    "/v1/audio/translations",
    summary="Translate speech into English",
    openapi_extra=_describe(translates=True),
)
async def create_translation(request: Request) -> Response:
    """Translate the speech of an audio file into English."""
    return await _respond(request, translates=True)


async def _respond(request: Request, *, translates: bool) -> Response:
    state = state_of(request)
    state.check_capacity(caller_of(request))
    form, data = await _read_upload(request, state.settings.max_body_bytes)
    asked = parse_form(form)
    ignored = [*asked.ignored, *(["language"] if translates and asked.language else [])]
    caller = caller_with_deadline(request, None, state.settings.default_deadline_s)
    async with until_disconnect(request.receive), until_deadline(caller):
        model = await state.get_model(asked.model)  # which may be loading
    rules = model.info.audio
    if rules is None:
        raise bad_field("model", "takes no audio here")
    if translates and not _translates(rules.transcription):
        raise bad_field("model", "writes speech down, and does not translate it")
    speech = rules.transcription.speech
    if speech is None:
        check_without_times(asked)
    if asked.prompt and not _takes_prompt(rules.transcription):
        ignored.append("prompt")
    headers = report_ignored(ignored, strict=state.settings.strict)

    async def prepared() -> TranscriptionCall | SpeechCall:
        async with until_deadline(caller):
            if speech is not None:
                return await SpeechCall.prepare(
                    state, caller, model, asked, data, translates=translates
                )
            return await TranscriptionCall.prepare(
                state, caller, asked, rules.transcription, data, translates=translates
            )

    if asked.is_plain and not asked.stream:
        async with until_disconnect(request.receive):
            whole = await (await prepared()).complete()
        kind = "text/vtt" if asked.format == "vtt" else None
        return PlainTextResponse(_as_plain(whole, asked), headers=headers, media_type=kind)
    return await serve_call(request, prepared, stream=asked.stream, headers=headers)


def _as_plain(whole: Transcription | VerboseTranscription, asked: TranscriptionRequest) -> str:
    """Return a response in one of the formats that are not JSON."""
    if isinstance(whole, VerboseTranscription):
        return to_srt(whole.segments) if asked.format == "srt" else to_vtt(whole.segments)
    return whole.text + "\n"


def _takes_prompt(rules: TranscriptionRules) -> bool:
    return rules.takes_prompt or (rules.speech is not None and rules.speech.previous is not None)


def _translates(rules: TranscriptionRules) -> bool:
    speech = rules.speech
    return bool(rules.translation) or (speech is not None and speech.translate is not None)


class TranscriptionCall:
    """One request, ready to be submitted."""

    def __init__(self, conversation: Conversation, marker: str) -> None:
        self._conversation = conversation
        self._marker = marker

    @classmethod
    async def prepare(
        cls,
        state: ServerState,
        caller: Caller,
        asked: TranscriptionRequest,
        rules: TranscriptionRules,
        data: str,
        *,
        translates: bool,
    ) -> TranscriptionCall:
        """Encode the prompt.

        Args:
            state: the application's.
            caller: who sent the request.
            asked: the request.
            rules: of the model.
            data: the file in base64.
            translates: whether the text is wanted in English.

        Raises:
            ApiError: 400, the model cannot be asked this, or the file cannot be heard.
        """
        language = None
        if translates:
            instruction, suffix = rules.translation, ""
        else:
            if asked.language is not None:
                language = language_code(asked.language, rules)
            instruction, suffix = rules.prompt_for(language)
        body = _chat_request(asked, rules, data, instruction)
        with _errors_about_file():
            conversation = await Conversation.prepare(state, caller, body, suffix=suffix)
        return cls(conversation, rules.marker if language is None else "")

    async def complete(self) -> Transcription:
        """The whole response."""
        transcript = Transcript(self._marker)
        with _errors_about_file(), self._conversation.generation() as generation:
            async for _ in self._pieces(generation, transcript):
                pass
        return Transcription(transcript.text, self._usage(generation))

    async def events(self) -> AsyncGenerator[bytes]:
        """The response as server-sent events, without the closing ``[DONE]``."""
        transcript = Transcript(self._marker)
        with _errors_about_file(), self._conversation.generation() as generation:
            async for piece in self._pieces(generation, transcript):
                yield to_event(TranscriptDelta(piece))
        yield to_event(TranscriptDone(transcript.text, self._usage(generation)))

    async def _pieces(self, generation: Generation, transcript: Transcript) -> AsyncGenerator[str]:
        async for deltas in self._conversation.parsed_steps(generation):
            parts = [part for delta in deltas for part in delta.parts]
            new = "".join(part.text for part in parts if isinstance(part, Text))
            if piece := transcript.add(new):
                yield piece
        if piece := transcript.end():
            yield piece

    def _usage(self, generation: Generation) -> TokenUsage:
        usage, heard = generation.usage, self._conversation.num_audio_tokens
        return TokenUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            input_token_details=InputTokenDetails(usage.prompt_tokens - heard, heard),
        )


def _chat_request(
    asked: TranscriptionRequest, rules: TranscriptionRules, data: str, instruction: str
) -> ChatRequest:
    # Its format is recognised, not believed.
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    content = [audio, *([{"type": "text", "text": instruction}] if instruction else [])]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if rules.takes_prompt:
        messages.insert(0, {"role": "system", "content": asked.prompt})
    return ChatRequest.read(
        {
            "model": asked.model,
            "messages": messages,
            "temperature": asked.temperature,
            "seed": asked.seed,
            "max_completion_tokens": asked.max_tokens,
            "stream": asked.stream,
        }
    )


async def _read_upload(request: Request, max_bytes: int) -> tuple[Form, str]:
    """Read the form; return it and the file in base64."""
    try:
        with tempfile.TemporaryDirectory(prefix="quire-audio-") as directory:
            path = Path(directory) / "upload"
            form = await read_form(request, "file", path, max_bytes)
            return form, await asyncio.to_thread(_encode, path)
    except OSError as error:
        raise StoreError(reason_of(error)) from error


def _encode(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@contextlib.contextmanager
def _errors_about_file() -> Iterator[None]:
    """Name the file in errors about the messages, which the client has not sent."""
    try:
        yield
    except (ApiError, RequestError) as error:
        if error.param is not None and error.param.startswith("messages"):
            error.message = error.message.replace(f"'{error.param}'", "'file'")
            error.param = "file"
        raise
