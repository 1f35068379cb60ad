"""Several clients of one engine: routes commands in and each client's output back.

    listening Unix socket ─accept─► a thread a client: Submit, Abort, control ──► loop's inbox
                                                                              │ one output a step
    each client ◄── its own rows, the engine's stats ◄── emit ◄───────────────┘

When a client disconnects, its own requests end and no others. Output is written by the loop's
thread, which a client that does not read would block, so the engine hangs up on such a client after
a short timeout. One that was only slow is told so once it reads on (``HungUp``): it must not take
this for the engine's death. It reconnects and resumes its streams, with requests of the same ids,
perhaps before the engine has reported the end of the old ones.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic, sleep
from typing import TypeVar

import msgspec

from engine.frames import (
    Abort,
    Begun,
    ControlReply,
    ControlRequest,
    FrameError,
    FrameReader,
    HungUp,
    Message,
    Output,
    Ping,
    Pong,
    Ready,
    Submit,
    encode,
    receive,
)
from engine.scheduler.output import OutputBuilder
from engine.sleep_controller import ControlCall
from engine.stats import EngineStats
from engine.types import EngineInfo, EngineOutput

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 2.0
_SEND_BUFFER_BYTES = 1 << 20
_ACCEPT_PAUSE_S = 0.2  # after the system refused a connection

_ValueT = TypeVar("_ValueT")


class ClientHub:
    """The clients of one engine, and the owners of its requests.

    ``emit`` is called by the loop's thread. Each client has a thread that records the owner of a
    request before passing it on, so the owner of any output is known. Every request has one row
    that ends it, and only then may another with its id follow.
    """

    def __init__(self, listener: socket.socket, info: EngineInfo) -> None:
        self._listener = listener
        self._ready_frame = encode(Ready(info))
        self._put: Callable[[Submit | Abort | ControlCall], None] = lambda command: None
        self._owners: dict[str, _Client] = {}  # of live requests
        self._ending: Counter[str] = Counter()  # ends to come of requests whose client is gone
        self._owners_lock = threading.Lock()  # for both
        self._clients: list[_Client] = []
        self._clients_lock = threading.Lock()  # a new client must not miss a change
        self._numbers = count(1)

    def start(self, put: Callable[[Submit | Abort | ControlCall], None]) -> None:
        """Start accepting clients; their commands are passed to ``put``."""
        self._put = put
        threading.Thread(target=self._accept, name="engine-clients", daemon=True).start()

    def announce(self, ready: Ready) -> None:
        """Send the loaded model and the engine's activity to every client, present and future."""
        with self._clients_lock:
            self._ready_frame = encode(ready)
            clients = list(self._clients)
        for client in clients:
            self._send(client, self._ready_frame)

    def emit(self, output: EngineOutput) -> None:
        """Send each client its rows. Only one gets the step's token count: counts are summed."""
        shares = self._split(output)
        if not shares:
            shares = dict.fromkeys(self._clients[:1], OutputBuilder())
        stats, sent_s = output.stats, monotonic()
        for client, share in shares.items():
            self._send(client, encode(Output(share.build(stats), sent_s)))
            stats = _without_step(stats)

    def begin(self, begun: Sequence[str], withdrawn: Sequence[str]) -> None:
        """Tell each client which of its requests the engine begins to work on, or puts back."""
        shares: dict[_Client, tuple[list[str], list[str]]] = {}
        with self._owners_lock:
            for column, request_ids in enumerate((begun, withdrawn)):
                for request_id in request_ids:
                    owner = self._owners.get(request_id)
                    if owner is not None:
                        shares.setdefault(owner, ([], []))[column].append(request_id)
        for client, ids in shares.items():
            self._send(client, encode(Begun(*map(tuple, ids))))

    # ------------------------------------------------------------ the loop's thread

    def _split(self, output: EngineOutput) -> dict[_Client, OutputBuilder]:
        with self._owners_lock:
            shares, is_whole = self._split_rows(output)
        # Every id in a sparse column is also in ``output.ids``.
        for share in shares.values():
            own = None if is_whole else set(share.ids)
            share.logprobs = _select_ids(own, output.logprobs)
            share.prompt_logprobs = _select_ids(own, output.prompt_logprobs)
            share.embeddings = _select_ids(own, output.embeddings)
            share.progress = _select_ids(own, output.progress)
            share.num_cached_tokens = _select_ids(own, output.num_cached_tokens)
            share.scheduled_s = _select_ids(own, output.scheduled_s)
            share.stop_token_ids = _select_ids(own, output.stop_token_ids)
            share.timings = _select_ids(own, output.timings)
            share.errors = _select_ids(own, output.errors)
        return shares

    def _split_rows(self, output: EngineOutput) -> tuple[dict[_Client, OutputBuilder], bool]:
        """Each client's rows, and whether all are one client's."""
        owners, ending = self._owners, self._ending
        shares: dict[_Client, OutputBuilder] = {}
        is_skipped = False
        for request_id, token_ids, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            if ending and request_id in ending:  # not the request that its client has made since
                is_skipped = True
                if reason is not None:
                    ending[request_id] -= 1
                    if not ending[request_id]:
                        del ending[request_id]
                continue
            owner = owners.get(request_id)
            if owner is None:
                is_skipped = True
                continue
            share = shares.get(owner)
            if share is None:
                share = shares[owner] = OutputBuilder()
            share.append(request_id, token_ids, reason)
            if reason is not None:
                del owners[request_id]
        return shares, len(shares) == 1 and not is_skipped

    def _send(self, client: _Client, frame: bytes) -> None:
        try:
            unsent = client.send(frame)
        except OSError:
            self._disconnect(client)  # its own thread will notice as well
            return
        if unsent:
            logger.warning("client %d does not read; hanging up", client.number)
            self._disconnect(client, reason=unsent + encode(HungUp()))

    # ------------------------------------------------------------ threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # no descriptors, perhaps; the client waits to be accepted
                if self._listener.fileno() < 0:
                    return  # it has been closed
                logger.warning("a client cannot be accepted yet: %s", error)
                sleep(_ACCEPT_PAUSE_S)
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            _set_send_timeout(connection, _SEND_TIMEOUT_S)
            client = _Client(next(self._numbers), connection)
            name = f"engine-client-{client.number}"
            threading.Thread(target=self._serve, args=(client,), name=name, daemon=True).start()

    def _serve(self, client: _Client) -> None:
        reader = FrameReader()
        try:
            with self._clients_lock:
                client.connection.sendall(self._ready_frame)
                self._clients.append(client)
            while messages := receive(client.connection, reader):
                for message in messages:
                    if not client.is_disconnected:
                        self._handle_message(client, message)
        except FrameError as error:
            logger.error("client %d sent something else than a frame: %s", client.number, error)
        except OSError:
            pass
        self._disconnect(client)
        client.connection.close()

    def _handle_message(self, client: _Client, message: Message) -> None:
        if isinstance(message, Ping):
            self._send(client, encode(Pong()))
            return
        if isinstance(message, ControlRequest):

            def answer(answered: ControlReply) -> None:
                self._send(client, encode(answered))

            self._put(ControlCall(message, answer))
            return
        if isinstance(message, Submit):
            self._disconnect_earlier(client, message)
            with client.lock:  # else it could be added after its client's requests were aborted
                if client.is_disconnected:
                    return
                with self._owners_lock:
                    self._owners.update((request.id, client) for request in message.requests)
                    self._put(message)
        elif isinstance(message, Abort):
            self._put(message)
        else:
            raise FrameError(f"{type(message).__name__} is not a client's to send")

    def _disconnect_earlier(self, client: _Client, message: Submit) -> None:
        """Disconnect who has asked for the same requests: ``client`` itself, before it came back.

        The end of its earlier connection may not have been noticed yet.
        """
        with self._owners_lock:
            owners = {self._owners.get(request.id, client) for request in message.requests}
        for owner in owners - {client}:
            self._disconnect(owner)

    def _disconnect(self, client: _Client, reason: bytes = b"") -> None:
        """Abort a client's requests and end its thread. Idempotent, from any thread.

        When it returns, and when a request has no owner any more, the engine has been told. With a
        ``reason``, the thread ends when the client has read it, however long that takes.
        """
        with client.lock:
            if client.is_disconnected:
                return
            client.is_disconnected = True
            if client in self._clients:
                self._clients.remove(client)
            with self._owners_lock:
                ids = tuple(id_ for id_, owner in self._owners.items() if owner is client)
                for request_id in ids:
                    del self._owners[request_id]
                self._ending.update(ids)
                self._put(Abort(ids))
        if reason:
            name = f"engine-client-{client.number}-end"
            threading.Thread(target=client.end, args=(reason,), name=name, daemon=True).start()
        else:
            client.end()


class _Client:
    """One API process, at the other end of ``connection``."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.lock = threading.Lock()
        self.is_disconnected = False
        self._send_lock = threading.Lock()  # shared by the loop's thread and its own
        self._is_cut_short = False  # a part of a frame was sent

    def send(self, frame: bytes) -> bytes:
        """Send a frame; returns the part of it that did not go out in time, after which there is no
        further frame. Raises OSError when the client is gone."""
        rest = memoryview(frame)
        with self._send_lock:
            if self._is_cut_short:
                return b""
            try:
                while rest:
                    rest = rest[self.connection.send(rest) :]
            except BlockingIOError:
                self._is_cut_short = True
        return bytes(rest)

    def end(self, last: bytes = b"") -> None:
        """Shut the connection down once the client has room for ``last``."""
        with contextlib.suppress(OSError):  # it has disconnected itself
            if last:
                _set_send_timeout(self.connection, 0.0)
                self.connection.sendall(last)
            self.connection.shutdown(socket.SHUT_RDWR)


def _select_ids(ids: set[str] | None, column: dict[str, _ValueT]) -> dict[str, _ValueT]:
    """The entries of a sparse column for ``ids``; all of them if None."""
    if ids is None or not column:
        return column
    return {id_: value for id_, value in column.items() if id_ in ids}


def _without_step(stats: EngineStats) -> EngineStats:
    return msgspec.structs.replace(stats, step_tokens=0) if stats.step_tokens else stats


def _set_send_timeout(connection: socket.socket, timeout_s: float) -> None:
    """Limit how long sending may block; 0: not at all. Unlike ``settimeout`` this leaves reading
    alone."""
    seconds, rest = divmod(timeout_s, 1.0)
    timeout = struct.pack("ll", int(seconds), int(rest * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
