"""Decodes audio files in a confined process (``engine/sandbox``): standard library and soundfile.

A file arrives as ``engine/sandbox/media.py`` says. Then ``{"open": true}`` is answered by
``{"rate": Hz, "channels": n, "frames": n}``, and each ``{"read": frames}`` by ``{"samples":
base64}``: the channels' mean as little-endian float32, empty at the end.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from engine.sandbox.media import Answer, exhausted, telling_errors

__all__ = ("exhausted", "prepare")


def prepare(first: dict[str, Any]) -> Answer:
    """Return the function that answers a frame."""
    import soundfile  # before files can no longer be opened

    return telling_errors(_Decoder(soundfile).answer)


class _Decoder:
    """One file at a time."""

    def __init__(self, soundfile: Any) -> None:
        self._soundfile = soundfile
        self._data = io.BytesIO()
        self._file: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a frame."""
        if "append" in request:
            self._data.write(base64.b64decode(request["append"]))
            return {}
        if "reset" in request:
            self._data, self._file = io.BytesIO(), None
            return {}
        if "open" in request:
            self._data.seek(0)
            self._file = file = self._soundfile.SoundFile(self._data)
            return {"rate": file.samplerate, "channels": file.channels, "frames": file.frames}
        block = self._file.read(request["read"], dtype="float32", always_2d=True)
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)
        return {"samples": base64.b64encode(mono.astype("<f4").tobytes()).decode()}
