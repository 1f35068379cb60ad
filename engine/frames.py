"""What crosses the boundary between API and engine process, and how.

A frame is a length (4 bytes, little-endian) and a message of that many bytes: msgpack of one of
the types below, told apart by their tag. Nothing on this wire can name code to run.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from engine.config import EngineConfig
from engine.types import EngineInfo, EngineOutput, Request

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18


class FrameError(Exception):
    """The bytes are no frame of ours."""


class Configure(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """To the engine, first of all: what to load."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """To the engine: queue these, in order."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """To the engine: end these; ids that are not live are skipped."""

    ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """To the engine: end after the step in flight."""


class Loading(msgspec.Struct, frozen=True, tag="loading", array_like=True):
    """From the engine: how far it has come with loading, 0 to 1."""

    fraction: float
    what: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """From the engine: it has loaded and takes requests."""

    info: EngineInfo


class Output(msgspec.Struct, frozen=True, tag="output", array_like=True):
    """From the engine: one step's news."""

    output: EngineOutput


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    """From the engine, last of all: why it ends. ``kind`` is the error's class name."""

    message: str
    kind: str


ToEngine = Configure | Submit | Abort | Shutdown
FromEngine = Loading | Ready | Output | Fatal
Message = ToEngine | FromEngine

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The frame that carries ``message``."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is too large to send")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Takes bytes as they come and gives the messages that they complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes, in order.

        Raises:
            FrameError: these bytes are no frame; nothing after them can be read.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame claims to be {length} bytes long")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            messages.append(_decode(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return messages


def receive(connection: socket.socket, reader: FrameReader) -> list[Message]:
    """Block until at least one message is complete; none means that the other side has gone.

    Raises:
        FrameError: what came is no frame.
    """
    while True:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            return []
        messages = reader.feed(data)
        if messages:
            return messages


def _decode(body: bytearray) -> Message:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None
