"""Videos in conversations of the offline ``LLM``: files, ``data:`` URLs, or frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.errors import InvalidParameter
from engine.images.base64 import decode_base64, is_video_url
from engine.video.read import VideoReader, process_frames
from engine.video.types import ProcessedVideo, VideoOptions, VideoRules

_KINDS = ("video", "video_url")


class VideoSource(NamedTuple):
    """A video as a conversation has it."""

    source: Any
    fps: Any = None
    num_frames: Any = None


def is_video(part: Any) -> bool:
    """Return whether a message's part is a video."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def source_of(part: Mapping[str, Any]) -> VideoSource:
    """Return the video of a part in the format of transformers or of vLLM."""
    found = next((part[name] for name in ("video", "video_url", "path") if name in part), None)
    if isinstance(found, Mapping):
        found = found.get("url")
    return VideoSource(found, part.get("fps"), part.get("num_frames"))


def process_videos(
    sources: Sequence[VideoSource], rules: VideoRules | None, reader: VideoReader
) -> list[ProcessedVideo]:
    """Preprocess videos for the model.

    Args:
        sources: paths, file contents, ``data:`` URLs, or frames: a list of Pillow images or arrays,
            or an array [num_frames, height, width, 3] of uint8.
        rules: of the model; None: it does not take videos.
        reader: decodes files.

    Raises:
        InvalidParameter: a video is unsuitable, or there are too many.
        OSError: a file cannot be read.
    """
    if not sources:
        return []
    if rules is None:
        raise InvalidParameter("this model takes no videos here; send text", param="messages")
    if len(sources) > rules.max_videos:
        problem = f"{len(sources)} videos; at most {rules.max_videos} are taken"
        raise InvalidParameter(problem, param="messages")
    return [_process(each, rules, reader) for each in sources]


def _process(given: VideoSource, rules: VideoRules, reader: VideoReader) -> ProcessedVideo:
    source = given.source
    if isinstance(source, (list, tuple, np.ndarray)):
        if given.num_frames is not None:
            problem = "'num_frames' is of files; all frames of a list are shown"
            raise InvalidParameter(problem, param="messages")
        fps = _positive(given.fps, "fps", (int, float))
        return process_frames(_frames(source), fps, rules)
    options = VideoOptions(
        num_frames=_positive(given.num_frames, "num_frames", (int,)),
        fps=_positive(given.fps, "fps", (int, float)),
    )
    if isinstance(source, str) and is_video_url(source):
        return reader.read(decode_base64(source.partition(",")[2], "video"), rules, options)
    if isinstance(source, str) and source[:5].lower() in ("data:", "http:", "https"):
        problem = "videos are files, or data: URLs in base64; nothing is fetched"
        raise InvalidParameter(problem, param="messages")
    if isinstance(source, (str, Path)):
        return reader.read(Path(source).read_bytes(), rules, options)
    if isinstance(source, (bytes, bytearray)):
        return reader.read(bytes(source), rules, options)
    problem = f"a video cannot be a {type(source).__name__}"
    raise InvalidParameter(problem, param="messages")


def _frames(source: Any) -> list[Any]:
    frames = list(source)
    for frame in frames:
        if not isinstance(frame, np.ndarray) and not hasattr(frame, "getbands"):
            problem = f"a frame of a video cannot be a {type(frame).__name__}"
            raise InvalidParameter(problem, param="messages")
    return frames


def _positive(value: Any, name: str, kinds: tuple[type, ...]) -> Any:
    if value is not None and (type(value) not in kinds or not 0 < value < 1e6):
        problem = f"a video's '{name}' must be a positive number, not {value!r:.80}"
        raise InvalidParameter(problem, param="messages")
    return value
