"""The bound of the images, videos and audio that requests in flight hold in memory."""

from __future__ import annotations

_MAX_BYTES = 2 * 2**30


class MediaBudget:
    """Counts the bytes of pixels and samples, from a request's admission to its end.

    Args:
        max_bytes: how many all requests may hold together.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0

    def can_reserve(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may be held."""
        return not num_bytes or self._num_bytes + num_bytes <= self.max_bytes

    def reserve(self, num_bytes: int) -> None:
        """Count bytes as held by a request, until ``release`` is called for them."""
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Undo ``reserve``."""
        self._num_bytes -= num_bytes
