"""Decoding of requests' audio on a thread, with a cache of recent clips."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.audio.types import AudioRules, ProcessedAudio
from engine.images.base64 import decode_base64
from server.media_cache import MediaCache

if TYPE_CHECKING:
    from engine.audio.read import AudioReader

_CACHE_BYTES = 64 * 2**20
_THREADS = 2  # one may resample while the other decodes


class AudioDecoder:
    """Decodes audio in a process of its own, which starts with the first clip."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="audio")
        self._lock = threading.Lock()
        self._started_reader: AudioReader | None = None
        self._cache: MediaCache[ProcessedAudio] = MediaCache(_CACHE_BYTES)

    async def decode(self, base64: str, rules: AudioRules) -> ProcessedAudio:
        """Decode a base64-encoded audio file.

        Raises:
            InvalidParameter: not base64, or not audio that the model can hear.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._decode, base64, rules
        )

    def close(self) -> None:
        """Stop the threads and the process. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._started_reader is not None:
            self._started_reader.close()

    def _decode(self, base64: str, rules: AudioRules) -> ProcessedAudio:
        data = decode_base64(base64, "audio")
        key = hashlib.blake2b(data).digest(), rules
        return self._cache.get(key, lambda: self._reader().read(data, rules))

    def _reader(self) -> AudioReader:
        with self._lock:
            if self._started_reader is None:
                # Not at the top: it needs numpy, which a server without audio never loads.
                from engine.audio.read import AudioReader

                self._started_reader = AudioReader()
            return self._started_reader
