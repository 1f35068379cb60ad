"""Decodes audio in containers that libsndfile does not read: standard library and PyAV.

It answers the frames of ``decode_worker.py``, in a confined process of its own. ``"padding"`` is
how many of the ``"frames"`` may be none of the signal.
"""

from __future__ import annotations

import base64
import importlib
import io
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

_MAX_ERROR_CHARS = 200
# Demuxers by FFmpeg's names. Others may want further files, which cannot be opened here anyway.
_FORMATS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "aac", "avi", "mpeg", "mpegts"),
    *("mp3", "ogg", "wav"),
)
_PADDING_S = 0.2  # what encoders add before and after; it is not decoded
_NOT_LIBRARY = ("av.__main__", "av.datasets")


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers a frame."""
    import av  # before files can no longer be opened
    import numpy

    for module in pkgutil.walk_packages(av.__path__, "av."):
        if module.name not in _NOT_LIBRARY:  # some are imported with a stream of their kind
            importlib.import_module(module.name)
    decoder = _Decoder(av, numpy)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return decoder.answer(request)
        except MemoryError:
            raise
        except Exception as error:  # the library raises several kinds on malformed files
            told = getattr(error, "strerror", "") or str(error) or type(error).__name__
            return {"error": told[:_MAX_ERROR_CHARS]}

    return answer


def exhausted() -> dict[str, Any]:
    """The answer when a file has used too much memory."""
    return {"error": "decoding used too much memory"}


class _Decoder:
    """One file at a time."""

    def __init__(self, av: Any, numpy: Any) -> None:
        self._av = av
        self._numpy = numpy
        self._data = io.BytesIO()
        self._pieces: Iterator[Any] = iter(())  # of mono samples

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a frame."""
        if "append" in request:
            self._data.write(base64.b64decode(request["append"]))
            return {}
        if "reset" in request:
            self._data, self._pieces = io.BytesIO(), iter(())
            return {}
        return self._open() if "open" in request else self._read(request["read"])

    def _container(self) -> Any:
        self._data.seek(0)
        container = self._av.open(
            self._data, mode="r", options={"format_whitelist": ",".join(_FORMATS)}
        )
        if not container.streams.audio:
            raise ValueError("it has no audio")
        container.streams.audio[0].codec_context.thread_count = 1
        return container

    def _open(self) -> dict[str, Any]:
        """Tell what the first samples are like; a header may tell half the rate (HE-AAC)."""
        with self._container() as container:
            stream = container.streams.audio[0]
            first = next(container.decode(audio=0), None)
            if first is None:
                raise ValueError("it has no audio")
            rate, layout = first.sample_rate, first.layout
            seconds = 0.0
            if stream.duration is not None and stream.time_base is not None:
                seconds = float(stream.duration * stream.time_base)
        self._pieces = self._decode(rate, layout.name)
        frames, padding = int(seconds * rate), int(_PADDING_S * rate)
        return {
            **{"rate": rate, "channels": layout.nb_channels},
            **{"frames": frames, "padding": padding},
        }

    def _decode(self, rate: int, layout: str) -> Iterator[Any]:
        """Yield mono samples: the mean of the channels."""
        resampler = self._av.AudioResampler(format="fltp", layout=layout, rate=rate)
        with self._container() as container:
            for frame in container.decode(audio=0):
                for piece in resampler.resample(frame):
                    yield piece.to_ndarray().mean(axis=0)
            for piece in resampler.resample(None):
                yield piece.to_ndarray().mean(axis=0)

    def _read(self, most: int) -> dict[str, Any]:
        """Return about ``most`` samples; none at the end."""
        pieces: list[Any] = []
        room = most
        for piece in self._pieces:
            pieces.append(piece)
            room -= piece.size
            if room <= 0:
                break
        mono = self._numpy.concatenate(pieces) if pieces else self._numpy.empty(0)
        return {"samples": base64.b64encode(mono.astype("<f4").tobytes()).decode()}
