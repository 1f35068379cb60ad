"""Conversion of a conversation's messages into the model's prompt and the media in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.audio.placeholders import expand_audio_tokens
from engine.audio.types import AudioClip, ProcessedAudio
from engine.errors import InvalidParameter
from engine.images.placeholders import SeenVideos, expand_image_tokens, make_rewriter
from engine.images.read import ProcessedImage
from engine.images.types import Image
from engine.video.types import ProcessedVideo
from server.errors import bad_field
from server.openai.content import audio_of, videos_of
from server.openai.endpoint import check_length
from server.openai.inputs import ChatRequest, TokenizeRequest
from server.openai.messages import Message
from server.state import Model, ServerState

# Of one prompt's pixels, and of its samples, as the model gets them.
_MAX_MEDIA_BYTES = 256 * 2**20
_Processed = TypeVar("_Processed", ProcessedImage, ProcessedAudio, ProcessedVideo)


class _Kind(NamedTuple):
    """How errors call what a prompt holds beside its text."""

    name: str
    all: str
    unit: str


_IMAGES, _AUDIO = _Kind("image", "images", "pixels"), _Kind("audio clip", "audio", "samples")
_VIDEOS = _Kind("video", "videos", "pixels")


class ChatPrompt(NamedTuple):
    """A prompt in which the placeholder tokens of each image, video and clip are expanded."""

    token_ids: list[int]
    images: tuple[Image, ...] = ()  # and the parts of videos
    audio: tuple[AudioClip, ...] = ()


async def encode_chat(
    state: ServerState,
    model: Model,
    body: ChatRequest | TokenizeRequest,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    add_special_tokens: bool = False,
    suffix: str = "",
) -> ChatPrompt:
    """Render a conversation with the model's template and encode it.

    Args:
        state: the application's, which reads images, videos and audio.
        model: the one whose template is used.
        body: the messages, and how the prompt ends.
        tools: shown to the model, in the form templates expect.
        template_kwargs: variables of the template, which those in ``body`` override.
        add_special_tokens: prepend what the tokenizer prepends to a text.
        suffix: follows the rendered conversation; may spell special tokens.

    Raises:
        ApiError: 400, an image, a video or a clip cannot be shown to the model.
        ContextLengthExceeded: the messages, the tools or the prompt are longer than any context.
        InvalidParameter: the template does not show the images, the videos or the audio.
        TemplateError: the template refused the messages, or timed out.
    """
    assert body.messages is not None
    continue_final = body.continues_answer
    wanted = body.add_generation_prompt
    if continue_final and body.messages[-1].role != "assistant":
        raise bad_field("continue_final_message", "needs a last message of the assistant")
    # One thread renders and encodes: a text that is useless would make other requests wait.
    check_length(sum(message.num_chars for message in body.messages), model, "messages")
    check_length(len(msgspec.json.encode(tools)), model, "tools")
    pictures = await _read_pictures(state, model, body.messages)
    seen = await _read_videos(state, model, body)
    sounds = await _read_sounds(state, model, body.messages)
    rules = model.info.images if pictures or seen else None
    token_ids = await model.template.encode_chat(
        [message.for_template(model.answer_format) for message in body.messages],
        _rewriter(model, None if rules is None else make_rewriter(pictures, rules, seen), suffix),
        tools=tools,
        add_generation_prompt=not continue_final if wanted is None else wanted,
        continue_final_message=continue_final,
        template_kwargs={**(template_kwargs or {}), **(body.chat_template_kwargs or {})},
    )
    if add_special_tokens:
        token_ids = model.tokenizer.encode("") + token_ids
    if sounds:  # no model takes both
        assert model.info.audio is not None
        token_ids, clips = expand_audio_tokens(token_ids, sounds, model.info.audio)
        return ChatPrompt(token_ids, audio=clips)
    if rules is None:
        return ChatPrompt(token_ids)
    return ChatPrompt(*expand_image_tokens(token_ids, pictures, rules, seen))


async def _read_pictures(
    state: ServerState, model: Model, messages: Sequence[Message]
) -> list[ProcessedImage]:
    """Read all messages' images in order, one by one: a disconnect leaves no work behind."""
    shown = [
        (f"messages.{index}.content", image.data)
        for index, message in enumerate(messages)
        for image in message.images.values()
    ]
    if not shown:
        return []
    rules = model.info.images
    if rules is None:
        raise bad_field(shown[0][0], "holds an image, and this model takes none here; send text")
    rules = rules.among(len(shown))
    return await _decode_each(
        shown, lambda data: state.images.decode(data, rules), rules.max_images, _IMAGES
    )


async def _read_videos(
    state: ServerState, model: Model, body: ChatRequest | TokenizeRequest
) -> SeenVideos | None:
    """Read all messages' videos in order, one by one; None: there are none."""
    shown = [
        (f"messages.{index}.content", part.data)
        for index, message in enumerate(body.messages or ())
        for part in videos_of(message.content)
    ]
    if not shown:
        return None
    rules = model.info.video
    if rules is None:
        raise bad_field(shown[0][0], "holds a video, and this model takes none here; send text")
    options = body.media_io_kwargs
    decoded = await _decode_each(
        shown, lambda data: state.videos.decode(data, rules, options), rules.max_videos, _VIDEOS
    )
    return SeenVideos(decoded, rules)


async def _read_sounds(
    state: ServerState, model: Model, messages: Sequence[Message]
) -> list[ProcessedAudio]:
    """Read all messages' audio in order, one by one."""
    heard = [
        (f"messages.{index}.content", part.data)
        for index, message in enumerate(messages)
        for part in audio_of(message.content)
    ]
    if not heard:
        return []
    rules = model.info.audio
    if rules is None:
        raise bad_field(heard[0][0], "holds audio, and this model takes none here; send text")
    return await _decode_each(
        heard, lambda data: state.audio.decode(data, rules), rules.max_clips, _AUDIO
    )


async def _decode_each(
    given: Sequence[tuple[str, str]],
    decode: Callable[[str], Awaitable[_Processed]],
    most: int,
    kind: _Kind,
) -> list[_Processed]:
    """Decode (field, data) one after the other. Raises ApiError (400)."""
    if len(given) > most:
        problem = f"holds {len(given)} {kind.name}s; at most {most} are taken"
        raise bad_field("messages", problem)
    decoded: list[_Processed] = []
    room = _MAX_MEDIA_BYTES
    for number, (param, data) in enumerate(given, 1):
        try:
            each = await decode(data)
        except InvalidParameter as error:
            problem = f"cannot be used, in {kind.name} {number} of {len(given)}: {error.message}"
            raise bad_field(param, problem) from None
        room -= each.num_bytes
        if room < 0:
            problem = f"holds {kind.all} of more than {_MAX_MEDIA_BYTES >> 20} MiB of {kind.unit}"
            raise bad_field("messages", problem)
        decoded.append(each)
    return decoded


def _rewriter(
    model: Model, rewrite: Callable[[str], str] | None, suffix: str
) -> Callable[[str], str]:
    """Check a rendered text's length, then apply ``rewrite`` and append ``suffix``."""

    def rewritten(text: str) -> str:
        check_length(len(text), model, "messages")
        return (text if rewrite is None else rewrite(text)) + suffix

    return rewritten
