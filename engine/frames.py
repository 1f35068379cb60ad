"""What crosses the boundary between API and engine process; ``engine/framing.py`` says how."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.errors import Failure
from engine.framing import MAX_FRAME_BYTES, FrameError, Framing, encode, receive
from engine.types import EngineInfo, EngineOutput, Request, Trace

__all__ = [
    "MAX_FRAME_BYTES",
    "Abort",
    "Answered",
    "Configure",
    "Fatal",
    "FrameError",
    "FrameReader",
    "FromEngine",
    "Loading",
    "Message",
    "Output",
    "Ping",
    "Pong",
    "Question",
    "Ready",
    "Shutdown",
    "StartProfile",
    "StopProfile",
    "Submit",
    "ToEngine",
    "encode",
    "receive",
]


class Configure(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """To the engine, first of all: what to load."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """To the engine: queue these, in order."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """To the engine: end these; ids that are not live are skipped."""

    ids: tuple[str, ...]


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile", array_like=True):
    """To the engine: record the next so many steps. It answers."""

    num_steps: int


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile", array_like=True):
    """To the engine: record no longer. It answers."""


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """To the engine: is the process there? Answered at once, whatever is being computed."""


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
    """From the engine: one step's news, of the requests that came over this connection."""

    output: EngineOutput
    sent_s: float  # time.monotonic(): of several clients' snapshots the newest is the true one


class Answered(msgspec.Struct, frozen=True, tag="answered", array_like=True):
    """From the engine: what came of a question. They are answered in the order they came in."""

    trace: Trace | None  # that a StopProfile has ended
    failure: Failure | None


class Pong(msgspec.Struct, frozen=True, tag="pong", array_like=True):
    """From the engine: it is."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    """From the engine, last of all: why it ends. ``kind`` is the error's class name."""

    message: str
    kind: str


Question = StartProfile | StopProfile
ToEngine = Configure | Submit | Abort | Question | Ping | Shutdown
FromEngine = Loading | Ready | Output | Answered | Pong | Fatal
Message = ToEngine | FromEngine

_decoder = msgspec.msgpack.Decoder(Message)


class FrameReader(Framing[Message]):
    """Reads the messages above."""

    def __init__(self) -> None:
        super().__init__(_decoder)
