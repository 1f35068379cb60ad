"""Decoding of requests' images on a small thread pool, with a cache of recent ones."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor

from engine.images.base64 import decode_base64
from engine.images.read import ProcessedImage, read_image
from engine.images.types import ImageRules
from server.media_cache import MediaCache

_THREADS = 2
_CACHE_BYTES = 64 * 2**20


class ImageDecoder:
    """Decodes images and caches the newest: a conversation resends its images with every turn.

    Args:
        cache_bytes: limit of the cache, in bytes of pixels.
    """

    def __init__(self, *, cache_bytes: int = _CACHE_BYTES) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._cache: MediaCache[ProcessedImage] = MediaCache(cache_bytes)

    async def decode(self, base64: str, rules: ImageRules) -> ProcessedImage:
        """Decode a base64-encoded image file.

        Raises:
            InvalidParameter: not base64, or not an image that the model can be shown.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._decode, base64, rules
        )

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _decode(self, base64: str, rules: ImageRules) -> ProcessedImage:
        key = hashlib.blake2b(base64.encode("utf-8", "surrogatepass")).digest(), rules
        return self._cache.get(key, lambda: read_image(decode_base64(base64), rules))
