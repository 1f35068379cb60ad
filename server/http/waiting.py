"""The server's answers while its model is still downloaded, before there is an application.

    listening sockets ──► WaitingRoom (a thread) ─ GET /health: 200 ─ all else: 503 and the reason
           │                    │ the model is there: connections are closed, the sockets are not
           └────────────────────┴──► the application

So an orchestrator can tell a slow download from a dead server, and no requests are routed here. The
application cannot answer for itself yet, because it is made from the model's files.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence

import uvicorn
import uvloop
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.access.keyring import KeyRing
from server.access.keys import ApiKeyMiddleware
from server.errors import ApiError
from server.http.context import send_error
from server.http.serve import uvicorn_config
from server.http.standard_headers import new_request_id, standard_headers
from server.settings import Settings

_RETRY_AFTER_S = "10"
_GRACE_S = 1.0  # for the requests of those who have connected when the room closes
_POLL_S = 0.02


class WaitingRoom:
    """Answers on the server's sockets from ``open`` until ``close``.

    Args:
        settings: the server's; its keys and its limits of connections hold here too.
        sockets: listening. Who connects after ``close`` waits for the application.
        reason: what requests are told; may be set at any time.

    Raises:
        InvalidSettings: the key file or the certificate cannot be used.
    """

    def __init__(self, settings: Settings, sockets: Sequence[socket.socket], reason: str) -> None:
        self.reason = reason
        self._sockets = sockets
        self._guarded = ApiKeyMiddleware(
            self._answer, KeyRing(settings.api_keys, settings.api_key_file)
        )
        config, _ = uvicorn_config(self, settings, lifespan="off")
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._run, name="waiting-room", daemon=True)

    def open(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop, once the requests of those who have connected are answered."""
        self._server.should_exit = True
        self._thread.join()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI passes it."""
        started_s = time.perf_counter()
        request_id = new_request_id()
        scope["state"] = {"request_id": request_id}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(standard_headers(request_id, started_s))
                headers["connection"] = "close"  # the next request is the application's
            await send(message)

        try:
            await self._guarded(scope, receive, send_with_headers)
        except ApiError as error:
            await send_error(error, scope, send_with_headers)

    def _run(self) -> None:
        copies = [sock.dup() for sock in self._sockets]  # uvicorn closes those that it is given
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._server.serve(sockets=copies))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose key is valid, if it needs one. Raises ApiError."""
        if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            alive = Response(b'{"status":"ok"}', media_type="application/json")
            await alive(scope, receive, send)
            return
        headers = {"retry-after": _RETRY_AFTER_S}
        raise ApiError(503, self.reason, code="engine_unavailable", headers=headers)


class _Server(uvicorn.Server):
    """uvicorn's server, which does not hang up on who has connected and is about to ask."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more, answer who has been accepted, then close."""
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _GRACE_S
        while self.server_state.connections:
            if loop.time() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        await super().shutdown(sockets)
