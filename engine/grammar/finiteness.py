"""Finds JSON schemas that no finite text satisfies: those that cannot do without themselves.

An example is a linked list whose every node requires the next one. A model that is held to it would
write until its tokens are used up, and never a valid text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_MAX_DEPTH = 100  # as deep as the library reads schemas
# References are settled in passes over all of them; each settles at least the next one of a chain.
_MAX_PASSES = 20


def has_finite_text(schema: Mapping[str, Any]) -> bool:
    """Whether a finite text may satisfy ``schema``, as far as its references are concerned.

    A schema has a finite text if all the schemas that it requires have one: the least fixed point
    of that rule. No other contradictions are looked for, and a chain that takes more than 20 passes
    is taken for finite.
    """
    targets = dict(_references(schema, schema, 0))
    endless = set(targets)
    for _ in range(_MAX_PASSES):
        settled = {name for name in endless if _is_finite(targets[name], endless, 0)}
        if not settled:
            return _is_finite(schema, endless, 0)
        endless -= settled
    return True


def _references(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the local references within ``schema`` and what they refer to."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(schema, Mapping):
        name = schema.get("$ref")
        if isinstance(name, str) and (target := _resolve(name, root)) is not None:
            yield name, target
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part, root, depth + 1)


def _resolve(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema at a JSON pointer within the document; None if there is none."""
    document, _, pointer = reference.partition("#")
    if document or (pointer and not pointer.startswith("/")):
        return None
    at: Any = root
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping):
            at = at.get(key)
        elif isinstance(at, list) and key.isdecimal() and int(key) < len(at):
            at = at[int(key)]
        else:
            return None
    return at if isinstance(at, Mapping) else None


def _is_finite(schema: Any, endless: set[str], depth: int) -> bool:
    """Whether ``schema`` has a finite text if the references in ``endless`` have none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return True
    if "const" in schema or "enum" in schema:
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference in endless:
        return False

    def are_finite(keyword: str) -> list[bool]:
        schemas = schema.get(keyword)
        each = schemas if isinstance(schemas, list) else []
        return [_is_finite(part, endless, depth + 1) for part in each]

    if not all(are_finite("allOf")):
        return False
    if any(found and not any(found) for found in (are_finite("anyOf"), are_finite("oneOf"))):
        return False
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(kind in _REQUIRED for kind in map(str, kinds)):
        return True  # it may be a number, for instance
    return not kinds or any(
        all(_is_finite(part, endless, depth + 1) for part in _REQUIRED[kind](schema))
        for kind in kinds
    )


def _required_values(schema: Mapping[str, Any]) -> Iterator[Any]:
    names, properties = schema.get("required"), schema.get("properties")
    if isinstance(names, list) and isinstance(properties, Mapping):
        yield from (properties.get(name) for name in names if isinstance(name, str))


def _required_items(schema: Mapping[str, Any]) -> Iterator[Any]:
    count, first = schema.get("minItems", 0), schema.get("prefixItems")
    if not isinstance(count, int) or count < 1:
        return
    first = first if isinstance(first, list) else []
    yield from first[:count]
    if count > len(first):
        yield schema.get("items")


_REQUIRED = {"array": _required_items, "object": _required_values}  # by type
