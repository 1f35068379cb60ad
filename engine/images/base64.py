"""Files encoded as text."""

from __future__ import annotations

import binascii
import re

from engine.errors import InvalidParameter

# RFC 2397, restricted to base64. Many clients leave out the subtype, as Qwen's own examples do.
_PARAMETERS = r"(/[\w.+-]+)?(;[\w.+-]+=[^;,]*)*;base64,"
_IMAGE_URL = re.compile(r"data:image" + _PARAMETERS, re.IGNORECASE)
# Ogg and WebM files are named as either kind of stream.
_AUDIO_URL = re.compile(r"data:(?:audio|video|application(?=/ogg))" + _PARAMETERS, re.IGNORECASE)
_VIDEO_URL = re.compile(r"data:(?:video|image(?=/gif))" + _PARAMETERS, re.IGNORECASE)
_MAX_HEAD = 256  # characters of a URL before its data
_WHITESPACE = re.compile(r"[\t\n\f\r ]+")


def is_data_url(url: str) -> bool:
    """Return whether a URL contains an image, in base64."""
    return _IMAGE_URL.match(url[:_MAX_HEAD]) is not None


def is_audio_url(url: str) -> bool:
    """Return whether a URL contains audio, in base64."""
    return _AUDIO_URL.match(url[:_MAX_HEAD]) is not None


def is_video_url(url: str) -> bool:
    """Return whether a URL contains a video, in base64."""
    return _VIDEO_URL.match(url[:_MAX_HEAD]) is not None


def decode_base64(text: str, kind: str = "image") -> bytes:
    """Decode base64 as browsers decode data: URLs: white space is ignored and padding is optional.

    Args:
        text: the encoded file.
        kind: what it is, for the error.

    Raises:
        InvalidParameter: it is not base64.
    """
    compact = _WHITESPACE.sub("", text)
    padding = "=" * (-len(compact) % 4)
    try:
        return binascii.a2b_base64(compact + padding, strict_mode=True)
    except ValueError:  # binascii.Error, or ValueError for non-ASCII text
        raise InvalidParameter(f"the {kind} is not in base64") from None
