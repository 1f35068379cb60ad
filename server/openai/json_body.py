"""Parsing of a request body's bytes into a JSON object, or an error that names the cause.

msgspec parses nearly every body. A body that it rejects is parsed again by the standard library,
which is slower but accepts what msgspec does not (a lone surrogate, a number out of range), so that
the error can name the field instead of calling the body malformed. It also skips a byte order mark,
which tools on Windows put before UTF-8 and RFC 8259 lets a reader ignore.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

from server.errors import ApiError, bad_field

_MAX_SCANNED_BYTES = 2**20  # longer bodies are not searched for what is nested too deeply
# An unterminated string is one to the end, or each quote in it would start another search.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_MAX_DIGITS = 400  # beyond what any float or integer field can mean; int() refuses at 4300


def parse_json_body(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in ``body``.

    Raises:
        ApiError: 400 ``invalid_json``, or 400 with ``param`` if one value cannot be represented;
            both if one is nested too deeply.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _parse_with_stdlib(body)
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def _parse_with_stdlib(body: bytes | bytearray) -> Any:
    """Parse what msgspec rejected. Raises ApiError unless the standard library accepts it."""
    if not body.strip():
        raise ApiError(400, "The body is empty; it must be a JSON object.", code="invalid_json")
    try:
        value = json.loads(
            body.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_int=_read_int
        )
        for path, fault in _invalid_values(value, ""):
            raise bad_field(path or "body", fault)
    except RecursionError:
        field = _deepest_field(body)
        if field is not None:
            raise bad_field(field, "is nested too deeply", code="invalid_json") from None
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise ApiError(400, "The body is not valid UTF-8.", code="invalid_json") from None
    except ValueError as error:
        reason = str(error)  # with line and column, if known
        message = f"The body is not valid JSON: {reason}"
        raise ApiError(400, message, code="invalid_json") from None
    return value


def _deepest_field(body: bytes | bytearray) -> str | None:
    """The field of an object that is nested deepest, as it is spelled in ``body``."""
    if len(body) > _MAX_SCANNED_BYTES:
        return None
    depth = deepest = 0
    last = deepest_field = b""  # before a bracket, the object's last own string is the key
    for found in _STRING_OR_BRACKET.finditer(body):
        token = found.group()
        if depth == 0 and token != b"{":
            return None  # not an object
        if token in b"[{":
            depth += 1
            if depth > deepest:
                deepest, deepest_field = depth, last
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            last = token[1:-1]
    return deepest_field.decode("utf-8", "replace")[:64] or None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _read_int(digits: str) -> int | float:
    # A placeholder for the number, which ``_invalid_values`` finds and names.
    return int(digits) if len(digits) <= _MAX_DIGITS else math.inf


def _invalid_values(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Paths (``messages.0.content``) of values that no field can represent, and why."""
    if isinstance(value, str):
        if not _is_unicode(value):
            yield path, "holds half of a surrogate pair, which is not text"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield path, "is a number out of range"
    elif isinstance(value, dict):
        for key, item in value.items():
            if not _is_unicode(key):
                yield path, "has a key that is not text"
            else:
                yield from _invalid_values(item, f"{path}.{key[:64]}" if path else key[:64])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _invalid_values(item, f"{path}.{index}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
