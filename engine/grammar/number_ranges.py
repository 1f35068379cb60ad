"""Ranges of numbers that the library takes too wide, and the bounds that make them right.

In ``0 < x <= 0.5`` it admits 0: so it does with each bound that is whole and exclusive, and from
which the range goes less than 1 away from zero. With a number just beyond that bound as a further
one, inclusive, the range is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from engine.grammar.finiteness import resolve

_KEYWORDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_LEAST_DISTANCE = 1e-9  # from an exclusive bound
_MAX_EXACT = 1e6  # numbers below are exact to that distance
_LOWEST = -(10**18)  # the library has failed below; it holds maxima of any size
_MAX_DEPTH = 8
_MAX_PARTS = 64  # of one schema that are looked at


def missing_bound(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, float]:
    """The bound that ``schema`` needs besides its own; mostly none.

    Its bounds are also those of ``allOf`` and of what it refers to, in ``root``.
    """
    if not any(name in schema for name in (*_KEYWORDS, "allOf")):
        return {}
    parts = list(islice(_parts(schema, root, 0), _MAX_PARTS))
    given = {
        name: [part[name] for part in parts if _is_number(part.get(name))] for name in _KEYWORDS
    }
    low = max(given["minimum"] + given["exclusiveMinimum"], default=None)
    high = min(given["maximum"] + given["exclusiveMaximum"], default=None)
    if low is None or high is None:
        return {}
    name, near, far = ("minimum", low, high) if low >= 0 else ("maximum", high, low)
    is_open = near in given[f"exclusive{name.title()}"]
    if not is_open or near != int(near) or not 0 < abs(far - near) < 1:
        return {}
    distance = min(_LEAST_DISTANCE, abs(far - near) / 2)
    return {name: near + math.copysign(distance, far - near)}


def usable_minimum(schema: Mapping[str, Any]) -> dict[str, int]:
    """A higher minimum in place of one that the library cannot hold: of 64-bit integers, mostly."""
    low, high = schema.get("minimum"), schema.get("maximum", 0)
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return {}
    return {"minimum": _LOWEST} if low < _LOWEST < high else {}


def _parts(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    """``schema`` and the schemas that hold besides it."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    several = schema.get("allOf")
    for each in several if isinstance(several, list) else ():
        yield from _parts(each, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield from _parts(resolve(reference, root), root, depth + 1)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= _MAX_EXACT
