"""Cancellation of a request's work when its client disconnects."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientDisconnected(Exception):
    """The connection closed before the response was complete."""


class until_disconnect:  # noqa: N801 - reads as the statement it is, like asyncio.timeout
    """``async with until_disconnect(receive):`` cancels its body when the client disconnects.

    The request's body must have been read. It works as ``asyncio.timeout`` does: outside the block
    the cancellation becomes :class:`ClientDisconnected`, and a cancellation from elsewhere passes
    unchanged.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> until_disconnect:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        gone = self._gone and self._task.uncancel() <= self._cancelling
        # A task holds the exception that it ended with, which holds its frames, which hold this
        # object. If this object held the task, the cycle would keep all of the request alive until
        # the garbage collector runs.
        del self._watcher, self._task
        if gone:
            if kind is asyncio.CancelledError:
                raise ClientDisconnected from error
            if kind is None:
                raise ClientDisconnected

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
