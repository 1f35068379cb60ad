"""Where a chat template shows system messages, and a move of those that it would not show.

Clients send several system messages, and send them in the middle of a conversation: agents tell a
model there what has changed. Many templates show only the first message of a conversation as a
system message, and refuse others or leave them out without a word; some know no such role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]

# Words that no template contains.
_SYSTEM, _OTHER, _USER, _ANSWER = "Zephyrine", "Quillonette", "Ambrosella", "Thistlemere"
_BETWEEN = "\n\n"


class SystemPlaces(NamedTuple):
    """The places at which a template shows system messages."""

    begins: bool = True  # one as the first message
    follows: bool = True  # another right after that one
    anywhere: bool = True  # between other messages and behind them


def find_places(shows: Callable[[Sequence[Message], Sequence[str]], bool]) -> SystemPlaces:
    """Find out by trial where a template shows system messages.

    Args:
        shows: whether the template accepts some messages and shows all of some words in them.

    Returns:
        All places if the template does not even show a user's message: nothing can be concluded.
    """
    user, answer = _message("user", _USER), _message("assistant", _ANSWER)
    system, other = _message("system", _SYSTEM), _message("system", _OTHER)
    if not shows([user], [_USER]):
        return SystemPlaces()
    begins = shows([system, user], [_SYSTEM, _USER])
    words = [_SYSTEM, _OTHER, _USER]
    return SystemPlaces(
        begins,
        begins and shows([system, other, user], words),
        begins
        and shows([system, user, answer, other, user], words)
        and shows([system, user, other], words),
    )


def place_system_messages(messages: Sequence[Message], places: SystemPlaces) -> list[Message]:
    """The messages, with the system messages that would not be shown joined to one that is.

    That is the one at the beginning; where the role is unknown, the first message of the user.
    The order of their texts is kept.
    """
    moved: list[Message] = []
    kept: list[Message] = []
    for message in messages:
        is_system = message.get("role") == "system"
        follows = bool(kept) and all(each.get("role") == "system" for each in kept)
        fits = places.anywhere or (places.follows if follows else places.begins and not kept)
        (moved if is_system and not fits else kept).append(message)
    if not moved:
        return kept
    if places.begins:
        num_leading = next(
            (at for at, each in enumerate(kept) if each.get("role") != "system"), len(kept)
        )
        first, rest = kept[:num_leading], kept[num_leading:]
        joined = _joined([*first[-1:], *moved])
        return [*first[:-1], {**(first[-1] if first else moved[0]), "content": joined}, *rest]
    for at, each in enumerate(kept):
        if each.get("role") == "user":
            kept[at] = {**each, "content": _joined([*moved, each])}
            return kept
    return [{"role": "user", "content": _joined(moved)}, *kept]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _joined(messages: Sequence[Message]) -> str | list[Any]:
    """The contents as one: a text if all of them are, otherwise a list of parts."""
    contents = [message.get("content") or "" for message in messages]
    if all(isinstance(content, str) for content in contents):
        return _BETWEEN.join(content for content in contents if content)
    parts: list[Any] = []
    for content in contents:
        if parts and content:
            parts.append({"type": "text", "text": _BETWEEN})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts
