"""A machine that runs only ranks of an engine: ``quire serve --node-rank 1``.

    wait for node 0 ─► enlist each rank ─► a process for each ─► one of them ends ─► end all, again

Ranks are processes of ``engine/parallel/follower.py``, as on node 0; each takes over the connection
on which it was enlisted. They end with the engine, which frees all memory of the model: what waits
for the next engine is this small process, which does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import msgspec

from engine.child import Child
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.framing import FrameError, encode
from engine.parallel.compatibility import fingerprint_node
from engine.parallel.handshake import (
    HANDSHAKE_TIMEOUT_S,
    HandshakeError,
    WrongSecret,
    authenticate_as_dialer,
    configure_socket,
    read_secret,
)
from engine.parallel.registration import RegisterRank, Rejected, receive_reply

logger = logging.getLogger(__name__)

_DIAL_TIMEOUT_S = 5.0
_RETRY_DELAY_S = 0.5  # between two attempts
_REMINDER_S = 30.0
_END_GRACE_S = 2.0


def serve_node(config: EngineConfig, default: EngineConfig) -> None:
    """Run ranks for node 0, for one engine after another, until SIGTERM or SIGINT.

    Args:
        config: of this machine, with ``nodes``.
        default: the default settings; node 0 must agree with whatever differs from them here.

    Raises:
        ModelLoadError: node 0 refuses this machine, or did not appear in time; one line.
    """
    with contextlib.suppress(_Stopped), _stoppable():
        node = _Node(config, default)
        while True:
            node.serve_once()


class _Node:
    def __init__(self, config: EngineConfig, default: EngineConfig) -> None:
        assert config.nodes is not None
        self._nodes = config.nodes
        self._secret = read_secret(config.nodes.secret_file)
        try:
            stands = fingerprint_node(config, defaults=default)
        except OSError as error:
            raise ModelLoadError(f"{error.filename}: {error.strerror}") from None
        rank, model = config.nodes.rank, config.model
        self._registration = RegisterRank(rank, 0, model, config.num_threads, stands)
        self._place = config.nodes.master_endpoint

    def serve_once(self) -> None:
        """Run the ranks of one engine, from its start to its end."""
        connections = self._join()
        ranks: list[Child] = []
        try:
            for connection in connections:
                descriptor = connection.fileno()
                arguments = "--leader", str(descriptor)
                follower = "engine.parallel.follower"
                ranks.append(Child(follower, *arguments, pass_fds=[descriptor]))
                connection.close()  # from now on only the rank's
            logger.info("the engine of %s has %d of its ranks here", self._place, len(ranks))
            _wait_for_any(ranks)
            logger.warning("the engine of %s has ended, and the ranks here with it", self._place)
        finally:
            for connection in connections:
                connection.close()
            for rank in ranks:
                rank.socket.close()
            for rank in ranks:
                rank.end(_END_GRACE_S)
        time.sleep(_RETRY_DELAY_S)

    def _join(self) -> list[socket.socket]:
        """Return all ranks' connections once node 0 accepts them. Raises ModelLoadError."""
        nodes, began_s = self._nodes, time.monotonic()
        reminded_s = began_s - _REMINDER_S
        while True:
            try:
                return self._register_all()
            except (OSError, HandshakeError, FrameError, _RetryLater) as error:
                reason = getattr(error, "strerror", None) or str(error)
            now_s = time.monotonic()
            if nodes.timeout_s and now_s - began_s > nodes.timeout_s:
                raise ModelLoadError(
                    f"node 0 did not come to {self._place} within {nodes.timeout_s:g} s "
                    f"(node_timeout_s): {reason}"
                )
            if now_s - reminded_s >= _REMINDER_S:
                reminded_s = now_s
                logger.info("waiting for node 0 at %s: %s", self._place, reason.lower())
            time.sleep(_RETRY_DELAY_S)

    def _register_all(self) -> list[socket.socket]:
        """Enlist all ranks. Raises ModelLoadError if node 0 will never accept them."""
        with contextlib.ExitStack() as stack:
            connections: list[socket.socket] = []
            num_ranks = 1
            while len(connections) < num_ranks:
                connection = stack.enter_context(self._dial())
                enlist = msgspec.structs.replace(self._registration, local_rank=len(connections))
                connection.sendall(encode(enlist))
                answer = receive_reply(connection)
                if isinstance(answer, Rejected):
                    if answer.is_final:
                        raise ModelLoadError(f"node 0 at {self._place} refuses: {answer.reason}")
                    raise _RetryLater(answer.reason)
                num_ranks = answer.num_ranks
                connection.settimeout(None)
                connections.append(connection)
            stack.pop_all()
            return connections

    def _dial(self) -> socket.socket:
        """Return an authenticated connection to node 0."""
        nodes = self._nodes
        connection = socket.create_connection(
            (nodes.master_addr, nodes.master_port), timeout=_DIAL_TIMEOUT_S
        )
        try:
            configure_socket(connection)
            authenticate_as_dialer(connection, self._secret)
        except WrongSecret:
            connection.close()
            raise ModelLoadError(f"node 0 at {self._place} has another secret") from None
        except BaseException:
            connection.close()
            raise
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        return connection


class _RetryLater(Exception):
    """Node 0 may accept this machine later."""


class _Stopped(BaseException):
    """This process was asked to end."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Make SIGTERM and SIGINT raise ``_Stopped``, once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped

    former = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _wait_for_any(ranks: Sequence[Child]) -> None:
    """Wait until one of the ranks has ended."""
    poll = select.poll()
    for rank in ranks:
        poll.register(rank.socket, 0)  # hang-ups are always reported
    poll.poll()
