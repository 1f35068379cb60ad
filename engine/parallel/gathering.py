"""Node 0's side of joining: it accepts ranks on other machines while rank 0 loads.

    machine 0                                          machine 1: engine/parallel/node.py
    rank 0 ── Gathering ◄── handshake, Enlist ──────── node
       │                 ─── Welcome, or Refused ────►   │ starts
       └──── Join, Forward, ... on the same connection ──► rank 2, rank 3

It listens at the configured address only until all ranks are there, and accepts no messages from
peers that do not know the secret. A rank that disconnects in the meantime is forgotten: its
machine connects again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable

from engine.config import EngineConfig, NodesConfig
from engine.errors import ModelLoadError
from engine.framing import FrameError, encode
from engine.parallel.agreement import Standing, difference, standing
from engine.parallel.enlisting import Enlist, Refused, Welcome, hear_rank
from engine.parallel.frames import Failed
from engine.parallel.handshake import (
    HANDSHAKE_TIMEOUT_S,
    HandshakeError,
    admit,
    read_secret,
    tune,
)
from engine.parallel.ranks import HANG_UP, all_said

logger = logging.getLogger(__name__)

_BACKLOG = 64
_MAX_STRANGERS = 64  # unauthenticated connections at once
_REMINDER_S = 30.0


class RemoteRank:
    """A :class:`engine.parallel.ranks.Rank` on another machine, which manages its process."""

    def __init__(self, number: int, node: int, connection: socket.socket) -> None:
        self.socket = connection
        self.address: str = connection.getpeername()[0]  # its address for gloo connections
        self.name = f"rank {number} (node {node}, {self.address})"

    def end(self, grace_s: float) -> None:
        """See ``Rank``: it ends when its connection does."""
        self.socket.close()


class Gathering:
    """Collects the ranks on other machines as they connect.

    Args:
        config: of the engine, with ``nodes``.
        join: makes the first message to a rank.

    Raises:
        ModelLoadError: the secret or the address cannot be used.
    """

    def __init__(
        self, config: EngineConfig, join: Callable[[int, Enlist, RemoteRank], bytes]
    ) -> None:
        assert config.nodes is not None
        self._nodes = config.nodes
        self._config = config
        self._join = join
        self._a_node = config.ranks_here
        self._secret = read_secret(config.nodes.secret_file)
        self._listener = _listen(config.nodes)
        self.address: str = self._listener.getsockname()[0]  # of this machine, for the others
        self._lock = threading.Lock()
        self._found: dict[int, RemoteRank] = {}
        self._strangers: set[socket.socket] = set()
        self._problem: Exception | None = None
        self._is_over = False
        self._news, self._newsroom = socket.socketpair()
        self._standing: Standing | None = None
        self._thread = threading.Thread(target=self._gather, name="nodes", daemon=True)
        self._thread.start()

    def wait(self) -> list[RemoteRank]:
        """Return all ranks on other machines, in order.

        Raises:
            ModelLoadError: one cannot load, or they have not connected in time.
        """
        self._thread.join()
        if self._problem is not None:
            raise self._problem
        found, self._found = self._found, {}  # now owned by the caller
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """Stop listening, and close the connections that ``wait`` has not returned."""
        with self._lock:
            self._is_over = True
        with contextlib.suppress(OSError):
            self._newsroom.send(b"!")
        self._thread.join()
        for rank in self._found.values():
            rank.socket.close()

    # ------------------------------------------------------------ helpers

    def _gather(self) -> None:
        try:
            self._standing = standing(self._config)
            self._listen_until_all_are_there()
        except Exception as error:
            self._problem = error
        finally:
            with self._lock:
                self._is_over = True
                strangers = list(self._strangers)
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)
            for mine in (self._listener, self._news, self._newsroom):
                mine.close()

    def _listen_until_all_are_there(self) -> None:
        nodes, began_s = self._nodes, time.monotonic()
        reminded_s = began_s - _REMINDER_S
        while missing := self._missing():
            now_s = time.monotonic()
            if now_s - reminded_s >= _REMINDER_S:
                reminded_s = now_s
                logger.info("waiting for %s at %s", _these(missing), nodes.place)
            left_s = nodes.timeout_s - (now_s - began_s) if nodes.timeout_s else _REMINDER_S
            if left_s <= 0:
                raise ModelLoadError(
                    f"nnodes {nodes.size}: {_these(missing)} did not come to {nodes.place} "
                    f"within {nodes.timeout_s:g} s (node_timeout_s)"
                )
            self._await_news(min(left_s, _REMINDER_S))
            if self._is_over:
                return

    def _missing(self) -> list[int]:
        """Return the nodes with missing ranks."""
        with self._lock:
            ranks = range(self._a_node, self._a_node * self._nodes.size)
            return sorted({rank // self._a_node for rank in ranks if rank not in self._found})

    def _await_news(self, timeout_s: float) -> None:
        """Accept connections, and forget ranks that have disconnected."""
        with self._lock:
            found = {rank.socket.fileno(): number for number, rank in self._found.items()}
        poll = select.poll()
        for listened in (self._listener, self._news):
            poll.register(listened, select.POLLIN)
        for descriptor in found:
            poll.register(descriptor, HANG_UP)
        for descriptor, _ in poll.poll(timeout_s * 1000):
            if descriptor == self._listener.fileno():
                self._let_in()
            elif descriptor == self._news.fileno():
                self._news.recv(64)
            else:
                self._forget(found[descriptor])

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = self._listener.accept()
            with self._lock:
                if len(self._strangers) >= _MAX_STRANGERS:
                    stranger.close()
                    return
                self._strangers.add(stranger)
            threading.Thread(target=self._hear, args=(stranger,), daemon=True).start()

    def _hear(self, stranger: socket.socket) -> None:
        """Handle one peer in a thread of its own, so that a silent one delays nobody else."""
        peer, keeps = "somebody", False
        try:
            peer = stranger.getpeername()[0]
            tune(stranger)
            admit(stranger, self._secret)
            stranger.settimeout(HANDSHAKE_TIMEOUT_S)
            enlist = hear_rank(stranger)
            refusal = self._refusal(enlist)
            if refusal is None:
                stranger.settimeout(None)
                keeps = self._take(enlist, stranger)
            else:
                logger.warning("node %d (%s) was refused: %s", enlist.node, peer, refusal.reason)
                stranger.sendall(encode(refusal))
        except HandshakeError as error:
            logger.warning("%s came to %s and was sent away: %s", peer, self._nodes.place, error)
        except (FrameError, OSError) as error:
            logger.warning("%s came to %s and was lost: %s", peer, self._nodes.place, error)
        finally:
            with self._lock:
                self._strangers.discard(stranger)
            if not keeps:
                stranger.close()

    def _refusal(self, enlist: Enlist) -> Refused | None:
        node, nodes = enlist.node, self._nodes
        assert self._standing is not None
        reason = difference(self._standing, enlist.standing, node)
        if reason is None and not 0 < node < nodes.size:
            reason = (
                f"node_rank {node} is none of those that node 0 waits for, 1 to {nodes.size - 1}"
            )
        if reason is None and not 0 <= enlist.place < self._a_node:
            reason = f"node {node} has {self._a_node} ranks"
        return None if reason is None else Refused(reason, is_final=True)

    def _take(self, enlist: Enlist, connection: socket.socket) -> bool:
        """Register a connection as that of a rank; return whether it is one now."""
        number = enlist.node * self._a_node + enlist.place
        rank = RemoteRank(number, enlist.node, connection)
        with self._lock:
            if self._is_over or number in self._found:
                reason = f"rank {number} of node {enlist.node} is there already"
                connection.sendall(encode(Refused(reason, is_final=False)))
                return False
            connection.sendall(encode(Welcome(number, self._a_node)))
            connection.sendall(self._join(number, enlist, rank))
            self._found[number] = rank
            self._strangers.discard(connection)  # before ``wait`` can return
            with contextlib.suppress(OSError):
                self._newsroom.send(b"!")
        logger.info("%s is there", rank.name)
        return True

    def _forget(self, number: int) -> None:
        """Forget a rank that left too early. Raises ModelLoadError if it could not load."""
        with self._lock:
            rank = self._found.pop(number)
        with rank.socket, contextlib.suppress(OSError, FrameError):
            for message in all_said(rank):
                if isinstance(message, Failed):
                    raise ModelLoadError(message.message)
        logger.warning("%s is gone again", rank.name)


def _listen(nodes: NodesConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            nodes.master_addr, nodes.master_port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ModelLoadError(f"master_addr {nodes.master_addr}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise ModelLoadError(f"cannot listen on {nodes.place}: {reason}") from None
    return listener


def _these(nodes: Iterable[int]) -> str:
    return ", ".join(f"node {node}" for node in nodes)
