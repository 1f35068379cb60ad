"""Decoding of requests' videos on a thread, with a cache of recent ones."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.images.base64 import decode_base64
from engine.video.types import ProcessedVideo, VideoOptions, VideoRules
from server.media_cache import MediaCache

if TYPE_CHECKING:
    from engine.video.read import VideoReader

_CACHE_BYTES = 64 * 2**20


class VideoDecoder:
    """Decodes videos in a process of its own, which starts with the first one."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="videos")
        self._lock = threading.Lock()
        self._started_reader: VideoReader | None = None
        self._cache: MediaCache[ProcessedVideo] = MediaCache(_CACHE_BYTES)

    async def decode(
        self, base64: str, rules: VideoRules, options: VideoOptions | None
    ) -> ProcessedVideo:
        """Decode a base64-encoded video file.

        Raises:
            InvalidParameter: not base64, or not a video that the model can be shown.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._decode, base64, rules, options or VideoOptions()
        )

    def close(self) -> None:
        """Stop the thread and the process. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._started_reader is not None:
            self._started_reader.close()

    def _decode(self, base64: str, rules: VideoRules, options: VideoOptions) -> ProcessedVideo:
        data = decode_base64(base64, "video")
        key = hashlib.blake2b(data).digest(), rules, options
        return self._cache.get(key, lambda: self._reader().read(data, rules, options))

    def _reader(self) -> VideoReader:
        with self._lock:
            if self._started_reader is None:
                # Not at the top: it needs numpy, which a server without videos never loads.
                from engine.video.read import VideoReader

                self._started_reader = VideoReader()
            return self._started_reader
