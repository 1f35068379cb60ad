"""From the bytes of a video file, or a list of frames, to the pixels that a model sees.

Files are decoded by FFmpeg through PyAV, which is optional (the extra ``video``), in a confined
process, as they come from clients and the library is written in C. There, frames are also scaled,
with Pillow as images are.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import InvalidParameter
from engine.images.types import VideoPlace
from engine.sandbox.process import SandboxedProcess
from engine.video.sampling import Clip, choose_frames
from engine.video.sizing import frame_size
from engine.video.types import (
    PartText,
    ProcessedVideo,
    VideoOptions,
    VideoPart,
    VideoRules,
)

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = "MP4, MOV, WebM, Matroska, AVI, MPEG-TS or GIF"
NEEDS_PYAV = "PyAV is not installed here (.venv/bin/pip install -e '.[video]')"
MAX_PIXELS = 2**24  # of a frame before scaling; admits 4K
_HANDLER = Path(__file__).with_name("decode_worker.py")
_LIMIT_S = 30.0  # CPU time of an answer: up to the next frame that is shown
_TOTAL_LIMIT_S = 120.0  # of a file
_MEMORY_BYTES = 2**30
_SEND_BYTES = 4 * 2**20
_MAX_FPS = 1000.0


class VideoReader:
    """Decodes files in one confined process. Calls from several threads are serialised."""

    def __init__(self) -> None:
        self._process = SandboxedProcess(
            _HANDLER,
            ("engine", "numpy", "PIL", "av"),
            {},
            limit_s=_LIMIT_S,
            memory_bytes=_MEMORY_BYTES,
        )
        self._lock = threading.Lock()  # a file is several calls

    def close(self) -> None:
        """End the process. A later call starts a new one."""
        self._process.close()

    def read(self, data: bytes, rules: VideoRules, options: VideoOptions) -> ProcessedVideo:
        """Decode a file and convert it to what a model sees.

        Args:
            data: the file.
            rules: of the model.
            options: of the request.

        Raises:
            InvalidParameter: it is in another format, damaged, too long, large or narrow; or PyAV
                is not installed.
        """
        if not is_available():
            raise InvalidParameter(f"videos cannot be decoded: {NEEDS_PYAV}")
        with self._lock:
            try:
                return self._read(data, rules, options)
            except _Unreadable as error:
                problem = f"the video is not {FORMATS}, or is damaged ({error})"
                raise InvalidParameter(problem) from None

    def _read(self, data: bytes, rules: VideoRules, options: VideoOptions) -> ProcessedVideo:
        end_s = time.monotonic() + _TOTAL_LIMIT_S
        self._call({"reset": True})
        for begin in range(0, len(data), _SEND_BYTES):
            piece = data[begin : begin + _SEND_BYTES]
            self._call({"append": base64.b64encode(piece).decode()})
        longest = rules.max_seconds
        limits = {"max_frames": int(longest * _MAX_FPS), "max_pixels": MAX_PIXELS}
        found = self._call({"open": limits})
        clip = Clip(found["frames"], found["fps"])
        if clip.num_frames < 1 or not 0 < clip.fps <= _MAX_FPS:
            problem = f"the video has {clip.num_frames} frames, {clip.fps:g} per second"
            raise InvalidParameter(problem)
        if clip.seconds > longest:
            problem = f"the video is {clip.seconds:,.1f} s long; at most {longest} s are taken"
            raise InvalidParameter(problem)
        height, width = found["height"], found["width"]
        _check_pixels(height, width)
        while True:
            wanted = choose_frames(clip, rules.sampling, options, rules.part_frames)
            size = frame_size(height, width, len(wanted), rules)
            chosen = {"indices": wanted, "size": size, "resampling": rules.resampling.upper()}
            self._call({"select": chosen})
            frames = self._frames(len(wanted), end_s)
            if not isinstance(frames, int):
                shown_fps = len(wanted) / clip.seconds
                return _assemble(frames, wanted, clip.fps, shown_fps, size, rules)
            # Fewer than the file has packets: it is damaged, or has two fields for a frame.
            if not 0 < frames < clip.num_frames:
                raise _Unreadable("it has no frames")
            clip = Clip(frames, clip.fps)

    def _frames(self, count: int, end_s: float) -> list[bytes] | int:
        """Return the chosen frames; or if there are fewer, how many the file has."""
        frames: list[bytes] = []
        for _ in range(count):
            if time.monotonic() > end_s:
                raise InvalidParameter("decoding the video took too long")
            reply = self._call({"next": True})
            if "frames" in reply:
                return reply["frames"]
            # A frame that is chosen again is not sent again.
            frames.append(base64.b64decode(reply["pixels"]) if "pixels" in reply else frames[-1])
        return frames

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            reply = self._process.call(request)
        except TimeoutError:
            raise _Unreadable("decoding took too long") from None
        except OSError:
            raise _Unreadable("its decoder failed") from None
        if "error" in reply:
            raise _Unreadable(reply["error"].rstrip("."))
        return reply


def is_available() -> bool:
    """Return whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def process_frames(
    frames: Sequence[Image | np.ndarray], fps: float | None, rules: VideoRules
) -> ProcessedVideo:
    """Convert frames to what a model sees; all of them are shown.

    Args:
        frames: Pillow images, or arrays [height, width, 3] of uint8, of one size.
        fps: how many of them are a second; None: as many as the model's own rule shows.
        rules: of the model.

    Raises:
        InvalidParameter: there are none or too many, or they are too narrow or of several sizes.
    """
    from PIL.Image import Resampling

    if not 0 < len(frames) <= rules.sampling.max_frames:
        problem = f"a video has {len(frames)} frames; 1 to {rules.sampling.max_frames} are taken"
        raise InvalidParameter(problem)
    fps = fps or rules.sampling.fps or 2.0
    if not 0 < fps <= _MAX_FPS:
        raise InvalidParameter(f"a video has {fps:g} frames per second")
    images = [_as_image(frame) for frame in frames]
    width, height = images[0].size
    if any(image.size != (width, height) for image in images):
        raise InvalidParameter("the frames of a video have several sizes")
    _check_pixels(height, width)
    size = frame_size(height, width, len(images), rules)
    wanted, filter_ = (size[1], size[0]), Resampling[rules.resampling.upper()]
    scaled = [
        (image if image.size == wanted else image.resize(wanted, filter_)).tobytes()
        for image in images
    ]
    return _assemble(scaled, range(len(images)), fps, fps, size, rules)


def _as_image(frame: Image | np.ndarray) -> Image:
    from PIL.Image import fromarray

    if not isinstance(frame, np.ndarray):
        return frame.convert("RGB")
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        shape = f"{frame.dtype} of shape {list(frame.shape)}"
        raise InvalidParameter(f"a frame is uint8 of shape [height, width, 3], not {shape}")
    return fromarray(frame)


def _assemble(
    frames: Sequence[bytes],
    indices: Sequence[int],
    fps: float,
    shown_fps: float,
    size: tuple[int, int],
    rules: VideoRules,
) -> ProcessedVideo:
    """Make parts of scaled frames.

    Args:
        frames: of the same size.
        indices: of these in the video.
        fps: of the video.
        shown_fps: how many of ``frames`` are a second.
        size: their height and width.
        rules: of the model.
    """
    step = rules.part_frames
    missing = -len(frames) % step
    frames = [*frames, *[frames[-1]] * missing]
    seconds = [index / fps for index in (*indices, *[indices[-1]] * missing)]
    times = _rotary_times(len(frames) // step, shown_fps, rules)
    parts = []
    for number, time_ in enumerate(times):
        pixels = b"".join(frames[number * step : (number + 1) * step])
        place = VideoPlace(number, time_)
        parts.append(VideoPart(pixels, _digest(pixels, step, size, time_), place))
    text = "" if rules.text is None else "".join(_text_of(seconds, step, rules.text))
    return ProcessedVideo(*size, step, tuple(parts), text)


def _digest(pixels: bytes, step: int, size: tuple[int, int], time_: int | None) -> bytes:
    """Return what names a part: keys and values depend on its time as well as on its pixels."""
    shape = b"".join(number.to_bytes(4, "little") for number in (step, *size))
    digest = hashlib.blake2b(shape + repr(time_).encode() + b":", digest_size=32)
    digest.update(pixels)
    return digest.digest()


def _rotary_times(count: int, shown_fps: float, rules: VideoRules) -> list[int] | list[None]:
    """Return the rotary time of each part; see ``VideoRules.time_steps``."""
    if rules.time_steps is None:
        return [None] * count
    if not rules.time_steps:
        return list(range(count))
    # In single precision and cut to whole numbers, as the reference computes it.
    interval = np.float32(rules.time_steps) * np.float32(rules.part_frames / shown_fps)
    return (np.arange(count, dtype=np.float32) * interval).astype(int).tolist()


def _text_of(seconds: Sequence[float], step: int, text: PartText) -> Iterator[str]:
    """Yield pieces of the text that shows a video, whose frames are at ``seconds``."""
    for number, begin in enumerate(range(0, len(seconds), step)):
        at = seconds[begin]
        if text.time == "middle":
            at = (at + seconds[begin + step - 1]) / 2
        if number:
            yield text.separator
        yield text.part.format(time=at, second=int(at), number=number + 1)


def _check_pixels(height: int, width: int) -> None:
    if not 0 < height * width <= MAX_PIXELS:
        most = f"{MAX_PIXELS:,} pixels are taken"
        raise InvalidParameter(f"a video's frames have {width} x {height} pixels; at most {most}")


class _Unreadable(Exception):
    """What the decoder said."""
