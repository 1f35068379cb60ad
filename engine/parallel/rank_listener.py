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
from engine.parallel.compatibility import NodeFingerprint, find_mismatch, fingerprint_node
from engine.parallel.frames import Failed
from engine.parallel.handshake import (
    HANDSHAKE_TIMEOUT_S,
    HandshakeError,
    authenticate_as_listener,
    configure_socket,
    read_secret,
)
from engine.parallel.ranks import HANG_UP, read_rank_messages
from engine.parallel.registration import Accepted, RegisterRank, Rejected, receive_registration

logger = logging.getLogger(__name__)

_BACKLOG = 64
_MAX_UNAUTHENTICATED = 64  # unauthenticated connections at once
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


class RankListener:
    """Collects the ranks on other machines as they connect.

    Args:
        config: of the engine, with ``nodes``.
        join: makes the first message to a rank.

    Raises:
        ModelLoadError: the secret or the address cannot be used.
    """

    def __init__(
        self, config: EngineConfig, join: Callable[[int, RegisterRank, RemoteRank], bytes]
    ) -> None:
        assert config.nodes is not None
        self._nodes = config.nodes
        self._config = config
        self._join = join
        self._ranks_per_node = config.ranks_per_node
        self._secret = read_secret(config.nodes.secret_file)
        self._listener = _listen(config.nodes)
        self.address: str = self._listener.getsockname()[0]  # of this machine, for the others
        self._lock = threading.Lock()
        self._found: dict[int, RemoteRank] = {}
        self._unauthenticated: set[socket.socket] = set()
        self._problem: Exception | None = None
        self._is_closed = False
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._fingerprint: NodeFingerprint | None = None
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
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
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._wakeup_sender.send(b"!")
        self._thread.join()
        for rank in self._found.values():
            rank.socket.close()

    # ------------------------------------------------------------ helpers

    def _run(self) -> None:
        try:
            self._fingerprint = fingerprint_node(self._config)
            self._accept_until_complete()
        except Exception as error:
            self._problem = error
        finally:
            with self._lock:
                self._is_closed = True
                strangers = list(self._unauthenticated)
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)
            for mine in (self._listener, self._wakeup_receiver, self._wakeup_sender):
                mine.close()

    def _accept_until_complete(self) -> None:
        nodes, began_s = self._nodes, time.monotonic()
        reminded_s = began_s - _REMINDER_S
        while missing := self._missing():
            now_s = time.monotonic()
            if now_s - reminded_s >= _REMINDER_S:
                reminded_s = now_s
                logger.info("waiting for %s at %s", _format_nodes(missing), nodes.master_endpoint)
            left_s = nodes.timeout_s - (now_s - began_s) if nodes.timeout_s else _REMINDER_S
            if left_s <= 0:
                raise ModelLoadError(
                    f"nnodes {nodes.size}: {_format_nodes(missing)} did not come to "
                    f"{nodes.master_endpoint} "
                    f"within {nodes.timeout_s:g} s (node_timeout_s)"
                )
            self._poll(min(left_s, _REMINDER_S))
            if self._is_closed:
                return

    def _missing(self) -> list[int]:
        """Return the nodes with missing ranks."""
        with self._lock:
            ranks = range(self._ranks_per_node, self._ranks_per_node * self._nodes.size)
            return sorted(
                {rank // self._ranks_per_node for rank in ranks if rank not in self._found}
            )

    def _poll(self, timeout_s: float) -> None:
        """Accept connections, and forget ranks that have disconnected."""
        with self._lock:
            found = {rank.socket.fileno(): number for number, rank in self._found.items()}
        poll = select.poll()
        for listened in (self._listener, self._wakeup_receiver):
            poll.register(listened, select.POLLIN)
        for descriptor in found:
            poll.register(descriptor, HANG_UP)
        for descriptor, _ in poll.poll(timeout_s * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._wakeup_receiver.fileno():
                self._wakeup_receiver.recv(64)
            else:
                self._forget(found[descriptor])

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stranger, _ = self._listener.accept()
            with self._lock:
                if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
                    stranger.close()
                    return
                self._unauthenticated.add(stranger)
            threading.Thread(target=self._handle_peer, args=(stranger,), daemon=True).start()

    def _handle_peer(self, connection: socket.socket) -> None:
        """Handle one peer in a thread of its own, so that a silent one delays nobody else."""
        peer, keeps = "somebody", False
        try:
            peer = connection.getpeername()[0]
            configure_socket(connection)
            authenticate_as_listener(connection, self._secret)
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            enlist = receive_registration(connection)
            refusal = self._refusal(enlist)
            if refusal is None:
                connection.settimeout(None)
                keeps = self._register(enlist, connection)
            else:
                logger.warning("node %d (%s) was refused: %s", enlist.node, peer, refusal.reason)
                connection.sendall(encode(refusal))
        except HandshakeError as error:
            logger.warning(
                "%s came to %s and was sent away: %s", peer, self._nodes.master_endpoint, error
            )
        except (FrameError, OSError) as error:
            logger.warning(
                "%s came to %s and was lost: %s", peer, self._nodes.master_endpoint, error
            )
        finally:
            with self._lock:
                self._unauthenticated.discard(connection)
            if not keeps:
                connection.close()

    def _refusal(self, enlist: RegisterRank) -> Rejected | None:
        node, nodes = enlist.node, self._nodes
        assert self._fingerprint is not None
        reason = find_mismatch(self._fingerprint, enlist.fingerprint, node)
        if reason is None and not 0 < node < nodes.size:
            reason = (
                f"node_rank {node} is none of those that node 0 waits for, 1 to {nodes.size - 1}"
            )
        if reason is None and not 0 <= enlist.local_rank < self._ranks_per_node:
            reason = f"node {node} has {self._ranks_per_node} ranks"
        return None if reason is None else Rejected(reason, is_final=True)

    def _register(self, enlist: RegisterRank, connection: socket.socket) -> bool:
        """Register a connection as that of a rank; return whether it is one now."""
        number = enlist.node * self._ranks_per_node + enlist.local_rank
        rank = RemoteRank(number, enlist.node, connection)
        with self._lock:
            if self._is_closed or number in self._found:
                reason = f"rank {number} of node {enlist.node} is there already"
                connection.sendall(encode(Rejected(reason, is_final=False)))
                return False
            connection.sendall(encode(Accepted(number, self._ranks_per_node)))
            connection.sendall(self._join(number, enlist, rank))
            self._found[number] = rank
            self._unauthenticated.discard(connection)  # before ``wait`` can return
            with contextlib.suppress(OSError):
                self._wakeup_sender.send(b"!")
        logger.info("%s is there", rank.name)
        return True

    def _forget(self, number: int) -> None:
        """Forget a rank that left too early. Raises ModelLoadError if it could not load."""
        with self._lock:
            rank = self._found.pop(number)
        with rank.socket, contextlib.suppress(OSError, FrameError):
            for message in read_rank_messages(rank):
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
        raise ModelLoadError(f"cannot listen on {nodes.master_endpoint}: {reason}") from None
    return listener


def _format_nodes(nodes: Iterable[int]) -> str:
    return ", ".join(f"node {node}" for node in nodes)
