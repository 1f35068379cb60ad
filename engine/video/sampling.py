"""Which frames of a video are shown: the rules of Hugging Face's video processors."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from engine.video.types import FrameSampling, VideoOptions

_GRADED_LIMIT = 640  # frames
_GRADED_SECONDS = 2400.0


class Clip(msgspec.Struct, frozen=True):
    """What is known of a video before it is decoded."""

    num_frames: int  # at least 1
    fps: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.num_frames / self.fps


def choose_frames(
    clip: Clip, sampling: FrameSampling, options: VideoOptions, part_frames: int
) -> list[int]:
    """Return the numbers of the frames that are shown, ascending, possibly some twice.

    Args:
        clip: the video.
        sampling: the model's rule.
        options: of the request, which come first.
        part_frames: see ``VideoRules``.

    Returns:
        at least one, and at most ``sampling.max_frames`` different ones.
    """
    most = min(sampling.max_frames, clip.num_frames)
    if options.num_frames is not None:
        most = max(1, min(most, options.num_frames))
        if options.fps is None:
            return _spread(clip.num_frames, most, sampling.rule)
    if options.fps is not None:
        sampling = msgspec.structs.replace(sampling, fps=options.fps)
    found = _RULES[sampling.rule](clip, sampling, part_frames)
    # Some rules repeat the last frame to complete a part.
    return found if len(set(found)) <= most else _spread(clip.num_frames, most, sampling.rule)


def _spread(num_frames: int, count: int, rule: str) -> list[int]:
    """Return ``count`` of the frames, as far from each other as possible."""
    if rule == "steps":
        return _floor(np.arange(count) * (num_frames / count), num_frames)  # the first included
    if rule == "middles":
        return _floor((np.arange(count) + 0.5) * (num_frames / count), num_frames)
    return np.linspace(0, num_frames - 1, count).round().astype(int).tolist()


def _steps(clip: Clip, sampling: FrameSampling, part_frames: int) -> list[int]:
    """Qwen2-VL: whole parts, in equal steps from the first frame on."""
    most = min(sampling.max_frames, clip.num_frames) // part_frames * part_frames
    wanted = clip.num_frames / clip.fps * sampling.fps
    count = min(max(wanted, sampling.min_frames), most, clip.num_frames)
    count = math.floor(count / part_frames) * part_frames
    return _spread(clip.num_frames, count or min(clip.num_frames, part_frames), "steps")


def _ends(clip: Clip, sampling: FrameSampling, part_frames: int) -> list[int]:
    """Qwen3-VL: evenly from the first frame to the last."""
    wanted = int(clip.num_frames / clip.fps * sampling.fps)
    count = min(max(wanted, sampling.min_frames), sampling.max_frames, clip.num_frames)
    return _spread(clip.num_frames, count, "ends")


def _seconds(clip: Clip, sampling: FrameSampling, part_frames: int) -> list[int]:
    """GLM-4.1V: the frames at or after multiples of a time; of long videos a number of them."""
    last = clip.num_frames - 1
    if clip.seconds <= sampling.max_seconds:
        count = max(math.floor(clip.seconds * sampling.fps), 1)
        found = [math.ceil(i * clip.fps / sampling.fps) for i in range(count)]
    else:
        count = int(sampling.max_seconds * sampling.fps)
        times = np.linspace(0, clip.seconds, count).tolist()
        found = [math.ceil(time * clip.fps) for time in times]
        if count >= clip.num_frames:
            found = list(range(clip.num_frames))
    return _in_pairs(dict.fromkeys(min(last, each) for each in found))


def _graded(clip: Clip, sampling: FrameSampling, part_frames: int) -> list[int]:
    """GLM-4.6V: fewer frames a second the longer the video is, unless the request gives a rate.

    Its processor counts parts a second, so ``sampling.fps`` is 0 for its own choice.
    """
    seconds = min(clip.seconds, _GRADED_SECONDS)
    rate = 3.0 if seconds <= 30 else 1.0 if seconds <= 300 else 0.5
    rate = sampling.fps / part_frames if sampling.fps else rate
    count = min(int(seconds * rate * part_frames), _GRADED_LIMIT)
    if clip.num_frames < count:
        found = _whole(0, clip.num_frames - 1, count)
    else:
        found, due = [], 0.0
        for index in range(clip.num_frames):
            if index * (1 / clip.fps) >= due:
                due += 1 / (part_frames * rate)
                found.append(index)
                if due >= int(clip.seconds):
                    break
    if len(found) < count:
        begin, end = (found[0], found[-1]) if found else (0, clip.num_frames - 1)
        found = _whole(begin, end, count)
    elif len(found) > count:
        found = _whole(0, clip.num_frames - 1, count)
    return _in_pairs(dict.fromkeys(found or [0]))


def _middles(clip: Clip, sampling: FrameSampling, part_frames: int) -> list[int]:
    """InternVL: the middles of equal shares."""
    wanted = int(clip.num_frames / clip.fps * sampling.fps)
    count = min(max(wanted, sampling.min_frames), sampling.max_frames, clip.num_frames)
    return _spread(clip.num_frames, count, "middles")


def _whole(begin: int, end: int, count: int) -> list[int]:
    return np.linspace(begin, end, count, dtype=int).tolist()


def _floor(places: np.ndarray, num_frames: int) -> list[int]:
    # Single precision, as in the processors: a product just below a whole number becomes that.
    return np.minimum(places.astype(np.float32).astype(int), num_frames - 1).tolist()


def _in_pairs(frames: dict[int, None]) -> list[int]:
    found = list(frames)
    return found if len(found) % 2 == 0 else [*found, found[-1]]


_RULES: dict[str, Callable[[Clip, FrameSampling, int], list[int]]] = {
    "ends": _ends,
    "graded": _graded,
    "middles": _middles,
    "seconds": _seconds,
    "steps": _steps,
}
