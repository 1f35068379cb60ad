"""What a machine says to the first one, once both have shown that they know the secret, before the
connection becomes that of a rank (``engine/parallel/frames.py``).

    node ──► Enlist ──► node 0          for each of its ranks, one after the other
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
    """To node 0: here is a rank."""

    node: int
    place: int  # among the ranks of that node
    model: str  # where it lies there
    num_threads: int | None  # of each rank there; None: as many as there are cores for
    standing: Standing


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """To a node: what follows on this connection is for its rank."""

    rank: int
    num_ranks: int  # that each node has


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """To a node, last of all."""

    reason: str
    is_final: bool  # trying again would not help


_MAX_BYTES = 1 << 20  # of a message, which is small
_LENGTH = struct.Struct("<I")  # as in ``engine/framing.py``
_enlist = msgspec.msgpack.Decoder(Enlist)
_answer = msgspec.msgpack.Decoder(Welcome | Refused)


def hear_rank(connection: socket.socket) -> Enlist:
    """What a node says. Raises FrameError or OSError."""
    return _hear(connection, _enlist)


def hear_answer(connection: socket.socket) -> Welcome | Refused:
    """What node 0 answers, and nothing of what follows it. Raises FrameError or OSError."""
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
