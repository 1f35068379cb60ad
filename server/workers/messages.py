"""What supervisor and API workers tell one another; ``engine/framing.py`` says how."""

from __future__ import annotations

import msgspec

from engine.frames import Fatal
from engine.framing import Framing
from server.metrics import Numbers


class Setup(msgspec.Struct, frozen=True, tag="setup", array_like=True):
    """To a worker, first of all."""

    settings: str  # JSON
    engines: tuple[str, ...]  # paths of the Unix sockets at which they take clients
    given_up: tuple[int, ...]  # of these engines: by number
    directory: str  # of the files that the workers share
    index: int  # which of the workers this is, from 0


class Ask(msgspec.Struct, frozen=True, tag="ask", array_like=True):
    """To a worker: tell your numbers."""


class Told(msgspec.Struct, frozen=True, tag="told", array_like=True):
    """From a worker: its own numbers."""

    numbers: Numbers


class Gather(msgspec.Struct, frozen=True, tag="gather", array_like=True):
    """From a worker that is scraped: tell everybody's numbers."""


class Gathered(msgspec.Struct, frozen=True, tag="gathered", array_like=True):
    """To that worker: the sum over all workers, past ones included."""

    numbers: Numbers


class GivenUp(msgspec.Struct, frozen=True, tag="given_up", array_like=True):
    """To a worker: one of several engines is gone, and there will be no other in its place."""

    engine: int
    message: str


# Fatal, to a worker: there is no engine, and there will be none. From a worker: it cannot serve,
# and another could not either.
Message = Setup | Ask | Told | Gather | Gathered | GivenUp | Fatal

_decoder = msgspec.msgpack.Decoder(Message)


class MessageReader(Framing[Message]):
    """Reads the messages above."""

    def __init__(self) -> None:
        super().__init__(_decoder)
