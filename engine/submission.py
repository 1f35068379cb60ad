"""Requests on their way to another process: pixels go once, and not too many in one frame."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frames import Submit
from engine.types import Request


def pack(requests: Sequence[Request]) -> list[Submit]:
    """The messages that submit ``requests``, in their order.

    Those that hold images have a message each, as a frame is bounded; their forks come in it
    without the images, which ``unpack`` gives back to them.
    """
    groups: list[list[Request]] = []
    shown: set[str] = set()  # those in the newest group that hold images
    for request in requests:
        if request.images and request.fork_of in shown:
            request = msgspec.structs.replace(request, images=())
        elif request.images or not groups:
            groups.append([])
            shown = {request.id} if request.images else set()
        groups[-1].append(request)
    return [Submit(tuple(group)) for group in groups]


def unpack(requests: Sequence[Request]) -> list[Request]:
    """What ``pack`` has packed into one message."""
    images = {request.id: request.images for request in requests if request.images}
    return [
        msgspec.structs.replace(request, images=images[request.fork_of])
        if not request.images and request.fork_of in images
        else request
        for request in requests
    ]


def holds_images(submit: Submit) -> bool:
    """Whether a message is large enough to go alone."""
    return any(request.images for request in submit.requests)
