"""Noticing that the client has gone, while something is computed for it."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGone(Exception):
    """The connection closed before the answer was complete."""


class until_disconnect:  # noqa: N801 - reads as the statement it is, like asyncio.timeout
    """``async with until_disconnect(receive):`` cancels its body when the client goes away.

    The body of the request must have been read. Works as ``asyncio.timeout`` does: the
    cancellation becomes :class:`ClientGone` outside, and one from elsewhere passes as itself.
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
        # A task keeps the exception it ends with, that its frames, and these keep this object: were
        # it to keep the task, all of a request would stay until the collector looks for cycles.
        del self._watcher, self._task
        if gone:
            if kind is asyncio.CancelledError:
                raise ClientGone from error
            if kind is None:
                raise ClientGone

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
