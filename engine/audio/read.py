"""From the bytes of an audio file to the samples that a model hears.

Files are decoded by libsndfile in a confined process, as they come from clients and the library is
written in C. What it does not read is decoded by FFmpeg in another such process, if PyAV is
installed (the extra ``video``). The result is resampled here.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np

from engine.audio.resample import resample
from engine.audio.types import BYTES_PER_SAMPLE, AudioRules, ProcessedAudio
from engine.errors import InvalidParameter
from engine.sandbox.process import SandboxedProcess

FORMATS = "WAV, MP3, FLAC, Ogg (Vorbis or Opus) or AIFF"
_MORE_FORMATS = "MP4 (AAC), WebM"
_HANDLER = Path(__file__).with_name("decode_worker.py")
_PYAV_HANDLER = Path(__file__).with_name("av_worker.py")
_LIMIT_S = 10.0  # CPU time of one piece, which takes milliseconds
_SEND_BYTES = 4 * 2**20
_READ_FRAMES = 2**19  # per channel and piece
_MAX_CHANNELS = 16
_MIN_RATE, _MAX_RATE = 1_000, 384_000


class AudioReader:
    """Decodes files in confined processes. Calls from several threads are serialised."""

    def __init__(self) -> None:
        self._process = SandboxedProcess(
            _HANDLER, ("engine", "numpy", "cffi"), {}, limit_s=_LIMIT_S
        )
        self._pyav = SandboxedProcess(
            _PYAV_HANDLER, ("engine", "numpy", "av"), {}, limit_s=_LIMIT_S
        )
        self._lock = threading.Lock()  # a file is several calls

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        self._process.close()
        self._pyav.close()

    def read(self, data: bytes, rules: AudioRules) -> ProcessedAudio:
        """Decode a file and convert it to what a model hears.

        Raises:
            InvalidParameter: it is in another format, damaged, empty, too long or too short.
        """
        with self._lock:
            samples, rate = self._decode(data, rules)
        return process_audio(samples, rate, rules)

    def _decode(self, data: bytes, rules: AudioRules) -> tuple[np.ndarray, int]:
        """Return the mono samples of a file and their rate."""
        process, found = self._open(data)
        rate, channels = found["rate"], found["channels"]
        if channels > _MAX_CHANNELS or not _MIN_RATE <= rate <= _MAX_RATE:
            problem = f"the audio has {channels} channels of {rate} samples per second"
            raise InvalidParameter(problem)
        longest = _max_seconds(rules)
        # The header may be wrong in either direction, so what is decoded counts as well.
        room = int(longest * rate)
        if found["frames"] - found.get("padding", 0) > room:
            raise _too_long(found["frames"] / rate, longest)
        pieces: list[np.ndarray] = []
        try:
            while room >= 0:
                reply = _call(process, {"read": _READ_FRAMES})
                piece = np.frombuffer(base64.b64decode(reply["samples"]), "<f4")
                if not piece.size:
                    return np.concatenate(pieces or [piece]).astype(np.float32, copy=False), rate
                pieces.append(piece)
                room -= piece.size
        except _Unreadable as error:
            raise InvalidParameter(f"the audio is damaged ({error})") from None
        raise _too_long(longest, longest)

    def _open(self, data: bytes) -> tuple[SandboxedProcess, dict[str, Any]]:
        """Send a file to the process that can read it; return that, and what it says of it."""
        try:
            return self._process, _send(self._process, data)
        except _Unreadable as error:
            problem = f"the audio is not {FORMATS}, or is damaged ({error})"
        if not data:
            raise InvalidParameter(problem)
        if not has_pyav():
            problem = f"{problem}; {_MORE_FORMATS} need PyAV (.venv/bin/pip install -e '.[video]')"
            raise InvalidParameter(problem)
        try:
            return self._pyav, _send(self._pyav, data)
        except _Unreadable as error:
            raise InvalidParameter(f"{problem}, nor {_MORE_FORMATS} ({error})") from None


def has_pyav() -> bool:
    """Return whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def process_audio(samples: np.ndarray, rate: int, rules: AudioRules) -> ProcessedAudio:
    """Convert a signal to what a model hears.

    Args:
        samples: [n] or [n, channels], within -1 and 1.
        rate: its sampling rate in Hz.
        rules: of the model.

    Raises:
        InvalidParameter: it is empty, too long, too short or not finite, or its rate is unusual.
    """
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise InvalidParameter(f"the audio has {rate} samples per second")
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if samples.ndim != 1 or not samples.size:
        raise InvalidParameter("the audio is empty")
    longest = _max_seconds(rules)
    if samples.size > longest * rate:
        raise _too_long(samples.size / rate, longest)
    heard = resample(samples.astype(np.float32, copy=False), rate, rules.sampling_rate)
    if not np.isfinite(heard).all():
        raise InvalidParameter("the audio has samples that are not numbers")
    num_tokens = rules.num_tokens(heard.size)
    if not num_tokens:
        raise InvalidParameter(f"the audio is too short: {samples.size / rate:.3f} s")
    data = heard.astype("<f4", copy=False).tobytes()
    assert len(data) == heard.size * BYTES_PER_SAMPLE
    return ProcessedAudio(data, hashlib.blake2b(data, digest_size=32).digest(), num_tokens)


def _send(process: SandboxedProcess, data: bytes) -> dict[str, Any]:
    """Send a file; return what the process says of it. Raises _Unreadable."""
    _call(process, {"reset": True})
    for begin in range(0, len(data), _SEND_BYTES):
        piece = data[begin : begin + _SEND_BYTES]
        _call(process, {"append": base64.b64encode(piece).decode()})
    return _call(process, {"open": True})


def _call(process: SandboxedProcess, request: dict[str, Any]) -> dict[str, Any]:
    try:
        reply = process.call(request)
    except TimeoutError:
        raise _Unreadable("decoding took too long") from None
    except OSError:
        raise _Unreadable("its decoder failed") from None
    if "error" in reply:
        raise _Unreadable(reply["error"].rstrip("."))
    return reply


class _Unreadable(Exception):
    """What the decoder said."""


def _max_seconds(rules: AudioRules) -> float:
    longest = min(rules.max_samples, rules.model_max_samples or rules.max_samples)
    return longest / rules.sampling_rate


def _too_long(seconds: float, longest: float) -> InvalidParameter:
    if seconds <= longest:
        return InvalidParameter(f"the audio is longer than {longest:g} s, the most here")
    return InvalidParameter(f"the audio is {seconds:,.1f} s long; at most {longest:g} s are taken")
