"""Finds JSON schemas that no finite text satisfies: those that cannot do without themselves.

An example is a linked list whose every node requires the next one. A model that is held to it would
write until its tokens are used up, and never a valid text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote


def has_finite_text(schema: Mapping[str, Any]) -> bool:
    """Whether a finite text may satisfy ``schema``, as far as its references are concerned.

    A schema has a finite text if all the schemas that it requires have one: the least fixed point
    of that rule. No other contradictions are looked for. Takes time in proportion to the schema, by
    counting what each part still lacks (Dowling and Gallier 1984).
    """
    return _Circuit(schema).opens()


class _Gate:
    """Opens once it lacks no more of its inputs."""

    __slots__ = ("num_missing", "outputs")

    def __init__(self) -> None:
        self.num_missing = 0
        self.outputs: list[_Gate] = []  # gates that this one is an input of


class _Circuit:
    """A gate for each schema that another one requires; it opens if that has a finite text."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._gates: dict[int, _Gate] = {}  # by the id of the schema
        self._unread: list[tuple[_Gate, Any]] = []
        self._open: list[_Gate] = []  # gates whose outputs lack them still
        self._goal = self._gate(root)
        while self._unread:
            self._read(*self._unread.pop())

    def opens(self) -> bool:
        """Whether the gate of the root opens. To be called once."""
        while self._open:
            for gate in self._open.pop().outputs:
                gate.num_missing -= 1
                if not gate.num_missing:
                    self._open.append(gate)
        return self._goal.num_missing <= 0

    def _gate(self, schema: Any) -> _Gate:
        gate = self._gates.get(id(schema))
        if gate is None:
            gate = self._gates[id(schema)] = _Gate()
            self._unread.append((gate, schema))
        return gate

    def _read(self, gate: _Gate, schema: Any) -> None:
        """Connect the inputs of a schema's gate."""
        inputs: list[_Gate] = []
        if isinstance(schema, Mapping) and "const" not in schema and "enum" not in schema:
            reference = schema.get("$ref")
            if isinstance(reference, str):
                target = resolve(reference, self._root)
                inputs += [] if target is None else [self._gate(target)]
            for keyword in ("anyOf", "oneOf"):
                if isinstance(choices := schema.get(keyword), list) and choices:
                    inputs.append(self._any(map(self._gate, choices)))
            if isinstance(parts := schema.get("allOf"), list):
                inputs += map(self._gate, parts)
            kinds = schema.get("type")
            kinds = [kinds] if isinstance(kinds, str) else kinds
            # It may be a number, for instance, if not all of its types are compound ones.
            if (
                isinstance(kinds, list)
                and kinds
                and all(kind in _REQUIRED for kind in map(str, kinds))
            ):
                required = (_REQUIRED[kind](schema) for kind in dict.fromkeys(kinds))
                inputs.append(self._any([self._all(map(self._gate, each)) for each in required]))
        self._connect(gate, inputs)

    def _any(self, inputs: Iterable[_Gate]) -> _Gate:
        return self._connect(_Gate(), [*inputs], num_needed=1)

    def _all(self, inputs: Iterable[_Gate]) -> _Gate:
        return self._connect(_Gate(), [*inputs])

    def _connect(self, gate: _Gate, inputs: list[_Gate], *, num_needed: int | None = None) -> _Gate:
        gate.num_missing = len(inputs) if num_needed is None else num_needed
        for each in inputs:
            each.outputs.append(gate)
        if not gate.num_missing:
            self._open.append(gate)
        return gate


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
