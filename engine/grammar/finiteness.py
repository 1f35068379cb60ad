"""Finds JSON schemas that no finite text satisfies: those that cannot do without themselves.

An example is a linked list whose every node requires the next one. A model that is held to it would
write until its tokens are used up, and never a valid text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_MAX_DEPTH = 100  # as deep as the library reads schemas
# Schemas looked at in all; those of requests have some tens, and some of them refer to each other
# so often that looking at all takes minutes.
_MAX_VISITS = 50_000


def has_finite_text(schema: Mapping[str, Any]) -> bool:
    """Whether a finite text may satisfy ``schema``, as far as its references are concerned.

    A schema has a finite text if all the schemas that it requires have one: the least fixed point
    of that rule. No other contradictions are looked for, and what would take long is taken for
    finite.
    """
    return _Search(schema).has_finite_text()


class _Search:
    """Settles references in passes; each settles what depends on those before."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._targets = dict(_references(root, root, 0))
        self._endless = set(self._targets)  # references not known to have a finite text
        self._visits_left = _MAX_VISITS

    def has_finite_text(self) -> bool:
        settled = self._endless
        while settled and self._endless:
            settled = {name for name in self._endless if self._is_finite(self._targets[name], 0)}
            self._endless -= settled
        return self._is_finite(self._root, 0)

    def _is_finite(self, schema: Any, depth: int) -> bool:
        """Whether ``schema`` has a finite text if the unsettled references have none."""
        self._visits_left -= 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._visits_left < 0:
            return True
        if "const" in schema or "enum" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference in self._endless:
            return False

        def are_finite(parts: Any) -> list[bool]:
            each = parts if isinstance(parts, list) else []
            return [self._is_finite(part, depth + 1) for part in each]

        choices = are_finite(schema.get("anyOf")), are_finite(schema.get("oneOf"))
        if not all(are_finite(schema.get("allOf"))) or any(c and not any(c) for c in choices):
            return False
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not all(kind in _REQUIRED for kind in map(str, kinds)):
            return True  # it may be a number, for instance
        return not kinds or any(all(are_finite(_REQUIRED[kind](schema))) for kind in kinds)


def _references(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the local references within ``schema`` and what they refer to."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(schema, Mapping):
        name = schema.get("$ref")
        if isinstance(name, str) and (target := resolve(name, root)) is not None:
            yield name, target
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part, root, depth + 1)


def resolve(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema at a JSON pointer within the document ``root``; None if there is none."""
    document, _, pointer = reference.partition("#")
    if document or (pointer and not pointer.startswith("/")):
        return None
    at: Any = root
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping):
            at = at.get(key)
        elif isinstance(at, list) and key.isdecimal() and len(key) < 9 and int(key) < len(at):
            at = at[int(key)]
        else:
            return None
    return at if isinstance(at, Mapping) else None


def _required_values(schema: Mapping[str, Any]) -> list[Any]:
    names, properties = schema.get("required"), schema.get("properties")
    if not isinstance(names, list) or not isinstance(properties, Mapping):
        return []
    return [properties.get(name) for name in names if isinstance(name, str)]


def _required_items(schema: Mapping[str, Any]) -> list[Any]:
    count, first = schema.get("minItems", 0), schema.get("prefixItems")
    if not isinstance(count, int) or count < 1:
        return []
    first = first if isinstance(first, list) else []
    return [*first[:count], *([schema.get("items")] if count > len(first) else ())]


_REQUIRED = {"array": _required_items, "object": _required_values}  # by type
