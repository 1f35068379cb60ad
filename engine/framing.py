"""Messages on a stream socket between our own processes.

A frame is a length (4 bytes, little-endian) and a message of that many bytes: msgpack of one of
the types that the reader was made for, told apart by their tag. Nothing on this wire can name
code to run.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18

_encoder = msgspec.msgpack.Encoder()

MessageT = TypeVar("MessageT")


class FrameError(Exception):
    """The bytes are no frame of ours."""


def encode(message: msgspec.Struct) -> bytes:
    """The frame that carries ``message``."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is too large to send")
    return _LENGTH.pack(len(body)) + body


class Framing(Generic[MessageT]):
    """Takes bytes as they come and gives the messages that they complete."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """The messages that ``data`` completes, in order.

        Raises:
            FrameError: these bytes are no frame; nothing after them can be read.
        """
        buffer = self._buffer
        buffer += data
        messages: list[MessageT] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame claims to be {length} bytes long")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(self._decode(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return messages

    def _decode(self, body: bytearray) -> MessageT:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise FrameError(f"not a message: {error}") from None


def receive(
    connection: socket.socket, reader: Framing[MessageT], descriptors: list[int] | None = None
) -> list[MessageT]:
    """Block until at least one message is complete; none means that the other side has gone.

    Args:
        connection: a blocking stream socket.
        reader: of what comes there.
        descriptors: takes an open file that may come along; without it none is expected.

    Raises:
        FrameError: what came is no frame.
    """
    while True:
        if descriptors is None:
            data = connection.recv(_RECEIVE_BYTES)
        else:
            data, came, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, 1)
            descriptors += came
        if not data:
            return []
        messages = reader.feed(data)
        if messages:
            return messages
