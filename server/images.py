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
_MAX_IN_FLIGHT_BYTES = 2 * 2**30


class ImageDecoder:
    """Decodes images and caches the newest: a conversation resends its images with every turn.

    Args:
        cache_bytes: limit of the cache, in bytes of pixels.
        max_in_flight_bytes: limit of the pixels and samples that requests in flight hold.
    """

    def __init__(
        self, *, cache_bytes: int = _CACHE_BYTES, max_in_flight_bytes: int = _MAX_IN_FLIGHT_BYTES
    ) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._cache: MediaCache[ProcessedImage] = MediaCache(cache_bytes)
        self.max_in_flight_bytes = max_in_flight_bytes
        self._in_flight_bytes = 0

    async def decode(self, base64: str, rules: ImageRules) -> ProcessedImage:
        """Decode a base64-encoded image file.

        Raises:
            InvalidParameter: not base64, or not an image that the model can be shown.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._decode, base64, rules
        )

    def reserve(self, num_bytes: int) -> None:
        """Count pixels or samples as held by a request, until ``release`` is called for them."""
        self._in_flight_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Undo ``reserve``."""
        self._in_flight_bytes -= num_bytes

    def can_reserve(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may be held."""
        return not num_bytes or self._in_flight_bytes + num_bytes <= self.max_in_flight_bytes

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _decode(self, base64: str, rules: ImageRules) -> ProcessedImage:
        key = hashlib.blake2b(base64.encode("utf-8", "surrogatepass")).digest(), rules
        return self._cache.get(key, lambda: read_image(decode_base64(base64), rules))
