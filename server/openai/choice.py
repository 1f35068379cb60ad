"""The sequences of one API request: what is asked of them, and how far each has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.audio.types import AudioClip
from engine.client import RequestStream
from engine.images.types import Image
from engine.prompt_progress import PromptProgress
from engine.text.output import OutputDecoder, TextDelta
from engine.types import Request, SamplingParams, TokenLogprobs
from server.openai.outputs import FinishReason
from server.openai.timings import Timings


class Job(NamedTuple):
    """A prompt and its sampling parameters."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    images: tuple[Image, ...] = ()  # of the prompt
    audio: tuple[AudioClip, ...] = ()

    @property
    def media_bytes(self) -> int:
        """The size of the prompt's pixels and samples."""
        pixels = sum(len(image.pixels) for image in self.images)
        return pixels + sum(len(clip.samples) for clip in self.audio)


class Choice:
    """One sequence of a request, as its response sees it."""

    __slots__ = (
        "decoder",
        "finish_reason",
        "first_token_s",
        "index",
        "num_reasoning_tokens",
        "num_tokens",
        "progress",
        "prompt_index",
        "prompt_logprobs",
        "request",
        "scheduled_s",
        "stop_reason",
        "stream",
        "timings",
    )

    def __init__(
        self, index: int, prompt_index: int, request: Request, decoder: OutputDecoder
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.request = request
        self.decoder = decoder
        self.stream: RequestStream | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # of num_tokens; set by the parser of the text
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []  # of positions 1 and on
        self.progress: PromptProgress | None = None  # of its prompt, from the newest step
        self.scheduled_s = 0.0  # when the engine began it; time.monotonic()
        self.first_token_s = 0.0  # when it arrived
        self.timings: Timings | None = None  # once it has ended


Step = list[tuple[Choice, TextDelta]]  # the new text of each choice that has some
