"""Decodes audio files in a confined process (``engine/sandbox``): standard library and soundfile.

A file arrives in pieces, ``{"append": base64}``, each answered by ``{}``. Then ``{"open": true}``
is answered by ``{"rate": Hz, "channels": n, "frames": n}``, and each ``{"read": frames}`` by
``{"samples": base64}``: the channels' mean as little-endian float32, empty at the end. A file that
cannot be read is answered by ``{"error": ...}``. ``{"reset": true}`` begins another file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

_MAX_ERROR_CHARS = 200


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers a frame."""
    import soundfile  # before files can no longer be opened

    decoder = _Decoder(soundfile)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return decoder.answer(request)
        except MemoryError:
            raise
        except Exception as error:  # the library raises several kinds on malformed files
            told = getattr(error, "error_string", "") or str(error) or type(error).__name__
            return {"error": told[:_MAX_ERROR_CHARS]}

    return answer


def exhausted() -> dict[str, Any]:
    """The answer when a file has used too much memory."""
    return {"error": "decoding used too much memory"}


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
