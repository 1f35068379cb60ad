"""Decoding of requests' images on a small thread pool, with a cache of recent ones."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from engine.images.base64 import decode_base64
from engine.images.read import ProcessedImage, read_image
from engine.images.types import ImageRules

_THREADS = 2
_CACHE_BYTES = 64 * 2**20
_MAX_IN_FLIGHT_BYTES = 2 * 2**30

_Key = tuple[bytes, ImageRules]


class ImageDecoder:
    """Decodes images and caches the newest: a conversation resends its images with every turn.

    Args:
        cache_bytes: limit of the cache, in bytes of pixels.
        max_in_flight_bytes: limit of the pixels that requests in flight hold.
    """

    def __init__(
        self, *, cache_bytes: int = _CACHE_BYTES, max_in_flight_bytes: int = _MAX_IN_FLIGHT_BYTES
    ) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._cache: OrderedDict[_Key, ProcessedImage] = OrderedDict()  # least recently used first
        self._free_cache_bytes = cache_bytes
        self._lock = threading.Lock()  # guards the two above
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
        """Count pixels as held by a request, until ``release`` is called for them."""
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
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        picture = read_image(decode_base64(base64), rules)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = picture
                self._free_cache_bytes -= picture.num_bytes
            while self._free_cache_bytes < 0:
                self._free_cache_bytes += self._cache.popitem(last=False)[1].num_bytes
        return picture
