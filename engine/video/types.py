"""Data types of videos; see ``engine/types.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.images.types import AreaScaling, FixedScaling, Resampling, VideoPlace

# How frames are chosen; see ``engine/video/sampling.py``.
SamplingRule = Literal["steps", "ends", "seconds", "graded", "middles"]


class FrameSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames of a video a model is shown."""

    rule: SamplingRule
    fps: float = 2.0  # frames per second that are wanted
    min_frames: int = 1  # if the video has as many
    max_frames: int = 768
    max_seconds: float = 300.0  # of a video that is shown at the full rate, by "seconds"


class PartText(msgspec.Struct, frozen=True, kw_only=True):
    """Replaces what a chat template writes for a video by the text of its parts.

    It is applied before tokenisation, because the times are text. ``part`` contains
    ``VideoRules.token_id`` once, as text; in it ``{time}`` (seconds), ``{second}`` (whole seconds)
    and ``{number}`` (from 1) are formatted.
    """

    template_text: str
    part: str
    separator: str = ""  # between parts
    time: Literal["first", "middle"] = "first"  # of which of a part's frames


class FrameCap(msgspec.Struct, frozen=True):
    """A limit of each frame's pixels that follows from their number (``qwen-vl-utils``)."""

    max_video_tokens: int
    of_frame: bool  # the number is of a frame's tokens, not of the whole video's


class VideoRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes videos: their frames and sizes, and the tokens that represent them.

    A chat template writes ``token_id`` once for each video, or if there is a ``text``, that has it
    once for each part. The model's prompt has ``cell_token_id`` for each cell of each part, row by
    row.
    """

    token_id: int
    cell_token_id: int
    cell: int  # pixels, the side of the square that becomes one token
    part_frames: int = 1  # that are seen together; the last frame is repeated to complete a part
    sampling: FrameSampling
    scaling: AreaScaling | FixedScaling
    counts_frames: bool = False  # limits of the area are of all frames together, not of each
    frame_cap: FrameCap | None = None
    resampling: Resampling = "bicubic"
    text: PartText | None = None
    # Rotary positions of a model whose parts follow each other without text: the time advances by
    # one for each part (0), or by so much a second. None: each part has positions of its own, as an
    # image has.
    time_steps: float | None = None
    max_videos: int = 4  # per prompt
    max_seconds: int = 1800  # of a video
    max_tokens: int | None = None  # of a video; larger ones are scaled down


class VideoOptions(msgspec.Struct, frozen=True):
    """What a request says about its videos; None: as the model's processor does."""

    num_frames: int | None = None  # at most so many; without ``fps`` exactly, if there are as many
    fps: float | None = None


@dataclass(frozen=True)
class VideoPart:
    """Frames of a video that a model sees together."""

    pixels: bytes  # frames * height * width * 3, RGB
    digest: bytes  # of size, pixels and place
    place: VideoPlace


@dataclass(frozen=True)
class ProcessedVideo:
    """A video as a model sees it."""

    height: int  # pixels, whole cells
    width: int
    part_frames: int  # of each part
    parts: tuple[VideoPart, ...]
    text: str = ""  # what replaces the template's text, for models that have such

    @property
    def num_bytes(self) -> int:
        """The size of all pixels."""
        return sum(len(part.pixels) for part in self.parts)
