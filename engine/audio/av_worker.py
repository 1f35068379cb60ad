"""Decodes audio in containers that libsndfile does not read: standard library and PyAV.

It answers the frames of ``decode_worker.py``, in a confined process of its own. ``"padding"`` is
how many of the ``"frames"`` may be none of the signal.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

from engine.sandbox.media import Answer, exhausted, import_av, open_container, telling_errors

__all__ = ("exhausted", "prepare")

_FORMATS = (
    *("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "aac", "avi", "mpeg", "mpegts"),
    *("mp3", "ogg", "wav"),
)
_PADDING_S = 0.2  # what encoders add before and after; it is not decoded


def prepare(first: dict[str, Any]) -> Answer:
    """Return the function that answers a frame."""
    import numpy  # before files can no longer be opened

    return telling_errors(_Decoder(import_av(), numpy).answer)


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
        return open_container(self._av, self._data, _FORMATS, "audio")

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
