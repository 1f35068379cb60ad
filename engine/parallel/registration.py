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
from engine.parallel.compatibility import NodeFingerprint

MessageT = TypeVar("MessageT")


class RegisterRank(msgspec.Struct, frozen=True, tag="register_rank", array_like=True):
    """To node 0: a rank that wants to join."""

    node: int
    local_rank: int  # rank number on that node
    model: str  # its path there
    num_threads: int | None  # of each rank there; None: one per core
    fingerprint: NodeFingerprint


class Accepted(msgspec.Struct, frozen=True, tag="accepted", array_like=True):
    """To a node: the rest of this connection is for its rank."""

    rank: int
    num_ranks: int  # per node


class Rejected(msgspec.Struct, frozen=True, tag="rejected", array_like=True):
    """To a node, as the last message."""

    reason: str
    is_final: bool  # trying again would not help


_MAX_BYTES = 1 << 20  # of a message; real ones are small
_LENGTH = struct.Struct("<I")  # as in ``engine/framing.py``
_registration_decoder = msgspec.msgpack.Decoder(RegisterRank)
_reply_decoder = msgspec.msgpack.Decoder(Accepted | Rejected)


def receive_registration(connection: socket.socket) -> RegisterRank:
    """Read a node's message. Raises FrameError or OSError."""
    return _receive_message(connection, _registration_decoder)


def receive_reply(connection: socket.socket) -> Accepted | Rejected:
    """Read node 0's answer, and no bytes after it. Raises FrameError or OSError."""
    return _receive_message(connection, _reply_decoder)


def _receive_message(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]
) -> MessageT:
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
