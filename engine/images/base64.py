"""Files encoded as text."""

from __future__ import annotations

import binascii
import re

from engine.errors import InvalidParameter

# RFC 2397, restricted to base64 images.
_DATA_URL = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_MAX_HEAD = 256  # characters of a URL before its data
_WHITESPACE = re.compile(r"[\t\n\f\r ]+")


def is_data_url(url: str) -> bool:
    """Return whether a URL contains an image, in base64."""
    return _DATA_URL.match(url[:_MAX_HEAD]) is not None


def decode_base64(text: str) -> bytes:
    """Decode base64 as browsers decode data: URLs: white space is ignored and padding is optional.

    Raises:
        InvalidParameter: it is not base64.
    """
    compact = _WHITESPACE.sub("", text)
    padding = "=" * (-len(compact) % 4)
    try:
        return binascii.a2b_base64(compact + padding, strict_mode=True)
    except ValueError:  # binascii.Error, or ValueError for non-ASCII text
        raise InvalidParameter("the image is not in base64") from None
