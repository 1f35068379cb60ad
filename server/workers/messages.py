"""The messages between supervisor and API workers; ``engine/framing.py`` has their encoding."""

from __future__ import annotations

import msgspec

from engine.frames import Fatal
from engine.framing import Framing
from server.metrics import Numbers


class Setup(msgspec.Struct, frozen=True, tag="setup", array_like=True):
    """To a worker, as the first message."""

    settings: str  # JSON
    engines: tuple[str, ...]  # paths of the Unix sockets on which they accept clients
    given_up: tuple[int, ...]  # numbers of the engines that are gone for good
    directory: str  # of the files shared by the workers
    index: int  # the worker's index, from 0


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """To a worker: request for its metrics."""


class Told(msgspec.Struct, frozen=True, tag="told", array_like=True):
    """From a worker: its own metrics."""

    numbers: Numbers


class Gather(msgspec.Struct, frozen=True, tag="gather", array_like=True):
    """From a worker that is being scraped: request for the metrics of all workers."""


class Gathered(msgspec.Struct, frozen=True, tag="gathered", array_like=True):
    """To that worker: the sum over all workers, including those that have ended."""

    numbers: Numbers


class GivenUp(msgspec.Struct, frozen=True, tag="given_up", array_like=True):
    """To a worker: one of several engines is gone for good."""

    engine: int
    message: str


# Fatal, to a worker: the engine is gone for good. From a worker: it cannot serve, and neither could
# its replacement.
Message = Setup | Ask | Told | Gather | Gathered | GivenUp | Fatal

_decoder = msgspec.msgpack.Decoder(Message)


class MessageReader(Framing[Message]):
    """Reads the messages above."""

    def __init__(self) -> None:
        super().__init__(_decoder)
