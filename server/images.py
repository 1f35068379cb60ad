"""Decoding of requests' images on a small thread pool, with a cache of recent ones."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from engine.images.base64 import decode_base64
from engine.images.nouns import ImageRules
from engine.images.read import Picture, read_image

_THREADS = 2
_KEPT_BYTES = 64 * 2**20
_MOST_HELD_BYTES = 2 * 2**30

_Key = tuple[bytes, ImageRules]


class ImageReader:
    """Decodes images and caches the newest: a conversation resends its images with every turn.

    Args:
        kept_bytes: limit of the cache, in bytes of pixels.
        most_held_bytes: limit of the pixels that requests in flight hold.
    """

    def __init__(
        self, *, kept_bytes: int = _KEPT_BYTES, most_held_bytes: int = _MOST_HELD_BYTES
    ) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._kept: OrderedDict[_Key, Picture] = OrderedDict()  # least recently used first
        self._room = kept_bytes
        self._lock = threading.Lock()  # guards the two above
        self.most_held_bytes = most_held_bytes
        self._held_bytes = 0

    async def read(self, base64: str, rules: ImageRules) -> Picture:
        """Decode a base64-encoded image file.

        Raises:
            InvalidParameter: not base64, or not an image that the model can be shown.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._read, base64, rules
        )

    def hold(self, num_bytes: int) -> None:
        """Count pixels as held by a request, until ``let_go`` is called for them."""
        self._held_bytes += num_bytes

    def let_go(self, num_bytes: int) -> None:
        """Undo ``hold``."""
        self._held_bytes -= num_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may be held."""
        return not num_bytes or self._held_bytes + num_bytes <= self.most_held_bytes

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _read(self, base64: str, rules: ImageRules) -> Picture:
        key = hashlib.blake2b(base64.encode("utf-8", "surrogatepass")).digest(), rules
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        picture = read_image(decode_base64(base64), rules)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = picture
                self._room -= len(picture.pixels)
            while self._room < 0:
                self._room += len(self._kept.popitem(last=False)[1].pixels)
        return picture
