"""The field ``media_io_kwargs``, as vLLM's clients send it: which frames of videos are shown."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from engine.video.types import VideoOptions
from server.errors import shorten

_MAX_FRAMES, _MAX_FPS = 100_000, 1000
_NONE = -1  # "no limit"


def read_media_io(value: Any) -> VideoOptions | None:
    """Read ``{"video": {"num_frames": n, "fps": n}}``. Raises ValueError."""
    if value is None:
        return None
    video = _object(value, "", ("video",)).get("video")
    if video is None:
        return None
    fields = _object(video, "'video' ", ("num_frames", "fps"))
    num_frames, fps = fields.get("num_frames"), fields.get("fps")
    if num_frames not in (None, _NONE) and (
        type(num_frames) is not int or not 1 <= num_frames <= _MAX_FRAMES
    ):
        problem = f"'num_frames' must be -1 or a whole number from 1 to {_MAX_FRAMES:,}"
        raise ValueError(problem)
    if fps not in (None, _NONE) and (type(fps) not in (int, float) or not 0 < fps <= _MAX_FPS):
        raise ValueError(f"'fps' must be -1 or a number above 0, at most {_MAX_FPS:,}")
    return VideoOptions(
        num_frames=None if num_frames == _NONE else num_frames, fps=None if fps == _NONE else fps
    )


def _object(value: Any, prefix: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{prefix}must be an object")
    for name in value:
        if name not in names:
            known = " and ".join(f"'{each}'" for each in names)
            shown = shorten(str(name), 40)
            raise ValueError(f"{prefix}holds {shown!r}, which is not supported; {known} may be set")
    return value


_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "video": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {
                                "num_frames": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                                "fps": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                            },
                            "additionalProperties": False,
                        },
                        {"type": "null"},
                    ]
                }
            },
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}

MediaIo = Annotated[VideoOptions | None, PlainValidator(read_media_io), WithJsonSchema(_SCHEMA)]
