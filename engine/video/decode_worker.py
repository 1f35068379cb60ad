"""Decodes video files in a confined process (``engine/sandbox``): standard library, PyAV, Pillow.

A file arrives as ``engine/sandbox/media.py`` says. Then ``{"open": {"max_frames": n, "max_pixels":
n}}`` is answered by ``{"frames": n, "fps": n, "height": n, "width": n}``; frames are counted up to
one more than the most. ``{"select": {"indices": [...], "size": [height, width], "resampling":
name}}`` chooses frames in ascending order, and is answered by ``{}``; each ``{"next": true}`` by
the next of these, scaled: ``{"pixels": base64}`` of RGB, or ``{}`` for the same one again, or
``{"frames": n}`` if there are only so many.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

from engine.sandbox.media import Answer, exhausted, import_av, open_container, telling_errors

__all__ = ("exhausted", "prepare")

_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2",
    "matroska,webm",
    "avi",
    "mpegts",
    "gif",
)
_TURNS = {90: "ROTATE_90", 180: "ROTATE_180", 270: "ROTATE_270"}  # counter-clockwise


def prepare(first: dict[str, Any]) -> Answer:
    """Return the function that answers a frame."""
    import PIL.Image  # before files can no longer be opened

    av = import_av()
    # Both libraries import further modules with the first picture.
    pixels = av.VideoFrame(2, 2, "yuv420p").to_ndarray(format="rgb24")
    PIL.Image.fromarray(pixels).resize((1, 1)).tobytes()
    return telling_errors(_Decoder(av, PIL.Image).answer)


class _Decoder:
    """One file at a time."""

    def __init__(self, av: Any, pil: Any) -> None:
        self._av = av
        self._pil = pil
        self._data = io.BytesIO()
        self._frames: Iterator[Any] = iter(())
        self._number = -1  # of the newest decoded frame
        self._newest: Any = None
        self._chosen: dict[str, Any] = {}
        self._next = 0  # among the chosen ones

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a frame."""
        if "append" in request:
            self._data.write(base64.b64decode(request["append"]))
            return {}
        if "reset" in request:
            self.__init__(self._av, self._pil)
            return {}
        if "open" in request:
            return self._open(**request["open"])
        if "select" in request:
            self._chosen, self._next = request["select"], 0
            self._frames, self._number, self._newest = self._decode(), -1, None
            return {}
        return self._take()

    def _container(self) -> Any:
        return open_container(self._av, self._data, _FORMATS, "video")

    def _open(self, max_frames: int, max_pixels: int) -> dict[str, Any]:
        """Count the frames without decoding them: headers may lack the number, or lie."""
        with self._container() as container:
            stream = container.streams.video[0]
            count, height, width = 0, stream.height, stream.width
            for packet in container.demux(stream):
                count += packet.size > 0
                if count > max_frames:
                    break
            rate = stream.average_rate or stream.guessed_rate or stream.base_rate
            if not rate:
                raise ValueError("its frame rate is unknown")
        if height * width <= max_pixels:  # too many are refused before any is decoded
            first = next(self._decode(), None)
            if first is None:
                raise ValueError("it has no frames")
            height, width = first.height, first.width  # headers may lie here, too
            if first.rotation % 180:
                height, width = width, height
        return {"frames": count, "fps": float(rate), "height": height, "width": width}

    def _decode(self) -> Iterator[Any]:
        with self._container() as container:
            yield from container.decode(video=0)

    def _take(self) -> dict[str, Any]:
        """Decode up to the next chosen frame."""
        wanted = self._chosen["indices"][self._next]
        self._next += 1
        if wanted == self._number:
            return {}
        while self._number < wanted:
            self._newest = next(self._frames, None)
            if self._newest is None:
                return {"frames": self._number + 1}
            self._number += 1
        return {"pixels": base64.b64encode(self._scaled(self._newest)).decode()}

    def _scaled(self, frame: Any) -> bytes:
        """Return a frame's pixels: RGB, upright, in the chosen size."""
        image = self._pil.fromarray(frame.to_ndarray(format="rgb24"))
        turn = _TURNS.get(frame.rotation % 360)
        if turn is not None:
            image = image.transpose(self._pil.Transpose[turn])
        height, width = self._chosen["size"]
        if image.size != (width, height):
            resampling = self._pil.Resampling[self._chosen["resampling"]]
            image = image.resize((width, height), resampling)
        return image.tobytes()
