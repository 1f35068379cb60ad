"""What crosses the boundary between API and engine process; ``engine/framing.py`` says how."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.errors import Failure
from engine.framing import MAX_FRAME_BYTES, FrameError, Framing, encode, receive
from engine.snapshot import Snapshot
from engine.types import EngineInfo, EngineOutput, Request, Trace

__all__ = [
    "MAX_FRAME_BYTES",
    "Abort",
    "Activity",
    "Answered",
    "Configure",
    "Fatal",
    "FrameError",
    "FrameReader",
    "FromEngine",
    "Loading",
    "Look",
    "Message",
    "Output",
    "Ping",
    "Pong",
    "Question",
    "Ready",
    "Reload",
    "RestQuestion",
    "Shutdown",
    "Sleep",
    "StartProfile",
    "StopProfile",
    "Submit",
    "ToEngine",
    "Wake",
    "encode",
    "receive",
]


# What an engine that has loaded does: from when it falls asleep until it is awake requests are
# refused, while its weights are exchanged they wait.
Activity = Literal["serving", "falling_asleep", "asleep", "waking", "reloading"]


class Configure(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """To the engine, first of all: what to load.

    Where it ``listens``, a listening Unix socket comes along, on which it takes further clients.
    """

    config: EngineConfig
    runner: str | None = None  # module:factory, where it is not the engine's own
    listens: bool = False


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


class Look(msgspec.Struct, frozen=True, tag="look", array_like=True):
    """To the engine: how do you stand? It answers, and records its steps for a while."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep", array_like=True):
    """To the engine: give memory back once nothing runs. It answers when it has."""

    level: int
    timeout_s: float  # after which what runs is ended


class Wake(msgspec.Struct, frozen=True, tag="wake", array_like=True):
    """To the engine: take the memory again. It answers when it has."""


class Reload(msgspec.Struct, frozen=True, tag="reload", array_like=True):
    """To the engine: once nothing runs, go on with other weights. It answers when it does."""

    model: str | None  # a directory; None: the one that was read last
    timeout_s: float  # after which what runs is ended


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """To the engine: is the process there? Answered at once, whatever is being computed."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """To the engine: end after the step in flight."""


class Loading(msgspec.Struct, frozen=True, tag="loading", array_like=True):
    """From the engine: how far it has come with loading, 0 to 1."""

    fraction: float
    what: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """From the engine: it has loaded; later, that this or what it does has changed."""

    info: EngineInfo
    activity: Activity = "serving"


class Output(msgspec.Struct, frozen=True, tag="output", array_like=True):
    """From the engine: one step's news, of the requests that came over this connection."""

    output: EngineOutput
    sent_s: float  # time.monotonic(): of several clients' snapshots the newest is the true one


class Answered(msgspec.Struct, frozen=True, tag="answered", array_like=True):
    """From the engine: what came of a question. They are answered in the order they came in."""

    trace: Trace | None  # that a StopProfile has ended
    failure: Failure | None
    snapshot: Snapshot | None = None  # that a Look has asked for


class Pong(msgspec.Struct, frozen=True, tag="pong", array_like=True):
    """From the engine: it is."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    """From the engine, last of all: why it ends. ``kind`` is the error's class name."""

    message: str
    kind: str


RestQuestion = Sleep | Wake | Reload
Question = StartProfile | StopProfile | Look | RestQuestion
ToEngine = Configure | Submit | Abort | Question | Ping | Shutdown
FromEngine = Loading | Ready | Output | Answered | Pong | Fatal
Message = ToEngine | FromEngine

_decoder = msgspec.msgpack.Decoder(Message)


class FrameReader(Framing[Message]):
    """Reads the messages above."""

    def __init__(self) -> None:
        super().__init__(_decoder)
