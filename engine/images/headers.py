"""Check image file headers before a decoder reads them."""

from __future__ import annotations

import re

_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # of JPEG, except for those within a scan
_END, _SCAN = 0xD9, 0xDA


def webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height from a WebP header (RFC 9649); small numbers if there is none."""
    head = data[:30].ljust(30, b"\0")
    if head[12:16] == b"VP8X":
        return _number(head[24:27]) + 1, _number(head[27:30]) + 1
    if head[12:16] == b"VP8L":
        bits = _number(head[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return _number(head[26:28]) & 0x3FFF, _number(head[28:30]) & 0x3FFF


def has_many_scans(data: bytes, most: int) -> bool:
    """Return whether a JPEG file (ITU-T T.81) has more than ``most`` scans.

    Each scan is a pass over all pixels, even if it is only a few bytes long.
    """
    place, num_scans = 2, 0
    while num_scans <= most:
        marker = _MARKER.search(data, place)
        if marker is None or data[marker.end() - 1] == _END:
            return False
        num_scans += data[marker.end() - 1] == _SCAN
        place = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return True


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
