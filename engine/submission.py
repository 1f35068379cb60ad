"""Packs requests into messages: images and audio are sent once, and frames stay within limits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frames import Submit
from engine.types import Request


def pack(requests: Sequence[Request]) -> list[Submit]:
    """The messages that submit ``requests``, in order.

    A request with images or audio has a message of its own, because frames are bounded in size. Its
    forks are in the same message without these, which ``unpack`` restores.
    """
    groups: list[list[Request]] = []
    shown: set[str] = set()  # requests with images or audio in the newest group
    for request in requests:
        if request.media and request.fork_of in shown:
            request = msgspec.structs.replace(request, images=(), audio=())
        elif request.media or not groups:
            groups.append([])
            shown = {request.id} if request.media else set()
        groups[-1].append(request)
    return [Submit(tuple(group)) for group in groups]


def unpack(requests: Sequence[Request]) -> list[Request]:
    """The requests that ``pack`` put into one message."""
    leaders = {request.id: request for request in requests if request.media}
    return [
        request if request.media else _with_media_of(leaders.get(request.fork_of or ""), request)
        for request in requests
    ]


def has_media(submit: Submit) -> bool:
    """Whether a message is so large that it should be sent alone."""
    return any(request.media for request in submit.requests)


def _with_media_of(leader: Request | None, fork: Request) -> Request:
    if leader is None:
        return fork
    return msgspec.structs.replace(fork, images=leader.images, audio=leader.audio)
