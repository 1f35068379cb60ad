"""Decoding of requests' audio on a thread, with a cache of recent clips."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor

from engine.audio.read import AudioReader, ProcessedAudio
from engine.audio.types import AudioRules
from engine.images.base64 import decode_base64
from server.media_cache import MediaCache

_CACHE_BYTES = 64 * 2**20
_THREADS = 2  # one may resample while the other decodes


class AudioDecoder:
    """Decodes audio in a process of its own, which starts with the first clip."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="audio")
        self._reader = AudioReader()
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
        self._reader.close()

    def _decode(self, base64: str, rules: AudioRules) -> ProcessedAudio:
        data = decode_base64(base64, "audio")
        key = hashlib.blake2b(data).digest(), rules
        return self._cache.get(key, lambda: self._reader.read(data, rules))
