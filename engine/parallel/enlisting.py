"""Messages between a node and node 0, after both have proved that they know the secret and before
the connection becomes a rank's (``engine/parallel/frames.py``).

    node ──► Enlist ──► node 0          for each of its ranks, in order
    node ◄── Welcome or Refused ◄── node 0
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from engine.framing import FrameError
from engine.parallel.agreement import Standing

MessageT = TypeVar("MessageT")


class Enlist(msgspec.Struct, frozen=True, tag="enlist", array_like=True):
    """To node 0: a rank that wants to join."""

    node: int
    place: int  # rank number on that node
    model: str  # its path there
    num_threads: int | None  # of each rank there; None: one per core
    standing: Standing


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """To a node: the rest of this connection is for its rank."""

    rank: int
    num_ranks: int  # per node


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """To a node, as the last message."""

    reason: str
    is_final: bool  # trying again would not help


_MAX_BYTES = 1 << 20  # of a message; real ones are small
_LENGTH = struct.Struct("<I")  # as in ``engine/framing.py``
_enlist = msgspec.msgpack.Decoder(Enlist)
_answer = msgspec.msgpack.Decoder(Welcome | Refused)


def hear_rank(connection: socket.socket) -> Enlist:
    """Read a node's message. Raises FrameError or OSError."""
    return _hear(connection, _enlist)


def hear_answer(connection: socket.socket) -> Welcome | Refused:
    """Read node 0's answer, and no bytes after it. Raises FrameError or OSError."""
    return _hear(connection, _answer)


def _hear(connection: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if length > _MAX_BYTES:
        raise FrameError(f"a message claims to be {length} bytes long")
    try:
        return decoder.decode(_receive(connection, length))
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a message: {error}") from None


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        data = connection.recv(size - len(received))
        if not data:
            raise FrameError("the other side has hung up")
        received += data
    return received
