"""The hash chain that identifies the contents of full blocks.

    root ──► digest 0 ──► digest 1 ──► digest 2          (tokens past the last full block: none)
     salt     tokens        tokens       tokens
              0..15         16..31       32..47          (block size 16)

``digest i = blake2b(digest i-1 || tokens of block i)`` identifies the whole prefix up to the end of
block ``i``, so a block found by its digest needs no comparison of tokens. The hash is keyed with
random bytes drawn at start (RFC 7693, keyed BLAKE2b). Nobody outside can construct a collision,
and so no request can be served another's prefix. The root depends on the request's salt and
adapter, which separates their prefixes. All images have the same token, and so has all audio, so a
block that overlaps either also includes the digest of its contents.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from engine.media import Media

_DIGEST_BYTES = 16


class PrefixChain:
    """The digests of one sequence's full blocks, each computed once and kept.

    It survives preemption, since a sequence's tokens only ever grow.
    """

    __slots__ = ("_block_size", "_digests", "_key", "_media", "_parent")

    def __init__(
        self,
        key: bytes,
        salt: str,
        block_size: int,
        adapter: str = "",
        media: Sequence[Media] = (),
    ) -> None:
        self._key = key
        self._block_size = block_size
        self._media = media
        self._parent = _digest(key, b"root", salt.encode("utf-8", "surrogatepass"))
        if adapter:
            self._parent = _digest(key, self._parent, b"adapter" + adapter.encode())
        self._digests: list[bytes] = []

    def digests(self, token_ids: Sequence[int], num_blocks: int) -> list[bytes]:
        """The chain over ``token_ids``, at least ``num_blocks`` long; do not modify it.

        ``token_ids`` are all tokens of the sequence, at least ``num_blocks * block_size``.
        """
        digests = self._digests
        size = self._block_size
        for start in range(len(digests) * size, num_blocks * size, size):
            block = struct.pack(f"{size}i", *token_ids[start : start + size])
            if self._media:
                block += self._media_digests(start, start + size)
            self._parent = _digest(self._key, self._parent, block)
            digests.append(self._parent)
        return digests

    def _media_digests(self, begin: int, end: int) -> bytes:
        """The digests and starts of the images and audio that have tokens in a block."""
        return b"".join(
            struct.pack("q", each.start) + each.digest
            for each in self._media
            if each.start < end and begin < each.start + each.num_tokens
        )


def _digest(key: bytes, parent: bytes, contents: bytes) -> bytes:
    return blake2b(parent + contents, digest_size=_DIGEST_BYTES, key=key).digest()
