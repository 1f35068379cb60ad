"""The text interface of the offline ``LLM``: its tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from engine.audio.placeholders import expand_audio_tokens
from engine.audio.read import AudioReader
from engine.audio.types import AudioRules
from engine.images.placeholders import SeenVideos, expand_image_tokens, make_rewriter
from engine.images.types import ImageRules
from engine.offline.images import ChatPrompt, extract_media, process_images, process_sounds
from engine.offline.inputs import Prompt, as_prompts, check_conversation
from engine.offline.videos import process_videos
from engine.text.template import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer
from engine.video.read import VideoReader
from engine.video.types import VideoRules

Conversation = Sequence[Message]


class ChatOptions(TypedDict, total=False):
    """How a conversation is rendered; see ``TemplateOptions``."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class OfflineText:
    """A model's tokenizer and chat template.

    Args:
        directory: where they are read from.
        chat_template: a template's source or file, instead of the model's own.

    Raises:
        ModelLoadError: the tokenizer is missing or damaged.
    """

    _image_rules: ImageRules | None = None  # of the model, once it is loaded
    _audio_rules: AudioRules | None = None
    _video_rules: VideoRules | None = None

    def __init__(self, directory: str | Path, chat_template: str | None) -> None:
        self._tokenizer = Tokenizer.from_dir(directory)
        self._template = ChatTemplate.from_dir(directory, self._tokenizer, chat_template)
        self._audio_reader = AudioReader()
        self._video_reader = VideoReader()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """The token ids of a text; see ``Tokenizer.encode``."""
        return self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special
        )

    def encode_chat(self, messages: Conversation, **options: Unpack[ChatOptions]) -> list[int]:
        """The token ids that the chat template makes of a conversation; see ``ChatTemplate``.

        Message parts may be images, videos or audio (``docs/images.md``, ``docs/video.md``,
        ``docs/audio.md``). Each is represented by as many tokens as the model uses for it; only
        ``chat`` also passes what is seen and heard to the model.

        Raises:
            TemplateError: the template raised an error.
            InvalidParameter: an image, a video or a clip is unsuitable for the model.
            OSError: a file cannot be read.
        """
        return self._encode_conversation(messages, **options).token_ids

    def _encode_conversation(
        self, messages: Conversation, **options: Unpack[ChatOptions]
    ) -> ChatPrompt:
        """Same as ``encode_chat``, with the images, the videos and the audio."""
        check_conversation(messages)
        plain, media = extract_media(messages)
        pictures = process_images(media.images, self._image_rules)
        videos = process_videos(media.videos, self._video_rules, self._video_reader)
        heard = process_sounds(media.sounds, self._audio_rules, self._audio_reader)
        rules = self._image_rules if pictures or videos else None
        seen = None
        if videos and self._video_rules is not None:
            seen = SeenVideos(videos, self._video_rules)
        token_ids = self._template.encode_chat_sync(
            plain,
            None if rules is None else make_rewriter(pictures, rules, seen),
            tools=options.get("tools"),
            add_generation_prompt=options.get("add_generation_prompt", True),
            continue_final_message=options.get("continue_final_message", False),
            template_kwargs=options.get("chat_template_kwargs"),
        )
        if self._audio_rules is not None and heard:
            token_ids, clips = expand_audio_tokens(token_ids, heard, self._audio_rules)
            return ChatPrompt(token_ids, audio=clips)
        if rules is None:
            return ChatPrompt(token_ids)
        return ChatPrompt(*expand_image_tokens(token_ids, pictures, rules, seen))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; see ``Tokenizer.decode``."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _encode_prompts(
        self, prompts: Prompt | Sequence[Prompt]
    ) -> tuple[list[list[int]], list[str | None]]:
        """Each prompt's token ids, and its text if it was given as text."""
        several = as_prompts(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        encoded = iter(self._tokenizer.encode_batch([text for text in texts if text is not None]))
        ids = [next(encoded) if isinstance(item, str) else list(item) for item in several]
        return ids, texts

    def _close_text(self) -> None:
        """End the template process. Idempotent."""
        self._template.close()
        self._audio_reader.close()
        self._video_reader.close()
