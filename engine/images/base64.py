"""Files that come as text."""

from __future__ import annotations

import binascii
import re

from engine.errors import InvalidParameter

# RFC 2397, of an image and in base64.
_DATA_URL = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_MAX_HEAD = 256  # characters of a URL before its data
_WHITESPACE = re.compile(r"[\t\n\f\r ]+")


def is_data_url(url: str) -> bool:
    """Whether a URL holds an image itself, in base64."""
    return _DATA_URL.match(url[:_MAX_HEAD]) is not None


def decode_base64(text: str) -> bytes:
    """As browsers decode data: URLs: white space and what fills up the end may be left out.

    Raises:
        InvalidParameter: it holds something else than base64.
    """
    compact = _WHITESPACE.sub("", text)
    padding = "=" * (-len(compact) % 4)
    try:
        return binascii.a2b_base64(compact + padding, strict_mode=True)
    except ValueError:  # binascii's own is one; other characters than of ASCII give another
        raise InvalidParameter("the image is not in base64") from None
