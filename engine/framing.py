"""Framing of messages on a stream socket between our own processes.

A frame is a length (4 bytes, little-endian) followed by a msgpack message of that many bytes. The
message is one of the types that the reader was made for, identified by its tag. Nothing in this
format can name code to run.
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
    """The received bytes are not a valid frame."""


def encode(message: msgspec.Struct) -> bytes:
    """Encode ``message`` as a frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is too large to send")
    return _LENGTH.pack(len(body)) + body


class Framing(Generic[MessageT]):
    """Decodes a stream of bytes into messages as they become complete."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """The messages that ``data`` completes, in order.

        Raises:
            FrameError: the bytes are not a valid frame; nothing after them can be read.
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
    """Block until at least one message is complete; an empty list means end-of-file.

    Args:
        connection: a blocking stream socket.
        reader: the decoder of this connection.
        descriptors: receives a file descriptor that may come with the data; None: expect none.

    Raises:
        FrameError: the received bytes are not a valid frame.
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
