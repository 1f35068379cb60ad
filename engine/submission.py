"""Packs requests into messages: pixels are sent once, and frames stay within their limit."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frames import Submit
from engine.types import Request


def pack(requests: Sequence[Request]) -> list[Submit]:
    """The messages that submit ``requests``, in order.

    A request with images has a message of its own, because frames are bounded in size. Its forks
    are in the same message without the images, which ``unpack`` restores.
    """
    groups: list[list[Request]] = []
    shown: set[str] = set()  # requests with images in the newest group
    for request in requests:
        if request.images and request.fork_of in shown:
            request = msgspec.structs.replace(request, images=())
        elif request.images or not groups:
            groups.append([])
            shown = {request.id} if request.images else set()
        groups[-1].append(request)
    return [Submit(tuple(group)) for group in groups]


def unpack(requests: Sequence[Request]) -> list[Request]:
    """The requests that ``pack`` put into one message."""
    images = {request.id: request.images for request in requests if request.images}
    return [
        msgspec.structs.replace(request, images=images[request.fork_of])
        if not request.images and request.fork_of in images
        else request
        for request in requests
    ]


def has_images(submit: Submit) -> bool:
    """Whether a message is so large that it should be sent alone."""
    return any(request.images for request in submit.requests)
