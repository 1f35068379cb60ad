"""Fields inside a request's history that nothing reads.

The history is the longest part of a request, and almost all of it is as expected. So each object
is only compared with the names that are read of its kind, and a path is built only for a field
that is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from server.openai.unsupported import MAX_NAMED

_NEEDLESS = frozenset(
    {
        "cache_control",  # prefixes are cached anyway
        "prompt_cache_breakpoint",
        "parsed",  # made by OpenAI's SDK from the text or the arguments next to it
        "parsed_arguments",
    }
)
# Values that request nothing: every call here is the model's, and no document is cited.
_IDLE = (("caller", {"type": "direct"}), ("citations", {"enabled": False}))


class ReadFields(NamedTuple):
    """What is read of one kind of object: the names, and the kinds of the objects in them."""

    names: frozenset[str]
    within: Mapping[str, KindOf]


# The kind of an object; None if it holds whatever its author likes.
KindOf = Callable[[Mapping[str, Any]], ReadFields | None]


def read_fields_of(names: Iterable[str], **within: KindOf) -> ReadFields:
    """A kind of object.

    Args:
        names: the fields that are read, and those that request nothing whatever their value.
        within: the kinds of the objects in some of them, whether one or a list.
    """
    return ReadFields(frozenset(names) | _NEEDLESS, within)


def always(kind: ReadFields) -> KindOf:
    """The same kind for every object."""
    return lambda _: kind


def by_type(kinds: Mapping[str, ReadFields]) -> KindOf:
    """The kind that the object's ``type`` names; None if that is no string."""

    def kind_of(value: Mapping[str, Any]) -> ReadFields | None:
        name = value.get("type")
        return kinds.get(name) if isinstance(name, str) else None

    return kind_of


def unread_fields(history: Any, kind_of: KindOf, where: str) -> list[str]:
    """Paths of the fields that request something and are not read, such as ``messages.1.mood``.

    Paths that differ only in their indexes count as one, and the first is returned: a client that
    adds a field to each of its messages is told once. At most ``MAX_NAMED`` paths are returned.

    Args:
        history: an object or a list of objects, valid; anything else has no fields.
        kind_of: the kinds of the objects.
        where: the path of ``history`` in the request.
    """
    found: dict[tuple[str, ...], str] = {}
    _search(history, kind_of, (where,), found)
    return list(found.values())


def _search(
    value: Any, kind_of: KindOf, path: tuple[str | int, ...], found: dict[tuple[str, ...], str]
) -> None:
    if isinstance(value, dict):
        _search_object(value, kind_of, path, found)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            if isinstance(each, dict):
                _search_object(each, kind_of, (*path, index), found)


def _search_object(
    value: Mapping[str, Any],
    kind_of: KindOf,
    path: tuple[str | int, ...],
    found: dict[tuple[str, ...], str],
) -> None:
    kind = kind_of(value)
    if kind is None or len(found) >= MAX_NAMED:
        return
    if not kind.names.issuperset(value):
        names = [step for step in path if isinstance(step, str)]
        for name, content in value.items():
            if not content or name in kind.names or (name, content) in _IDLE:
                continue
            found.setdefault((*names, name), ".".join(map(str, (*path, name))))
            if len(found) >= MAX_NAMED:
                return
    for name, inner in kind.within.items():
        if name in value:
            _search(value[name], inner, (*path, name), found)
