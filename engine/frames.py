"""The messages between API and engine processes; for their encoding see ``engine/framing.py``."""

from __future__ import annotations

import os
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
    "Begun",
    "Configure",
    "ControlReply",
    "ControlRequest",
    "Fatal",
    "FrameError",
    "FrameReader",
    "FromEngine",
    "GetSnapshot",
    "HungUp",
    "LifecycleRequest",
    "Loading",
    "Message",
    "Output",
    "Ping",
    "Pong",
    "Ready",
    "Reload",
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


# What a loaded engine is doing. From falling asleep until it is awake again, requests are refused;
# while its weights are replaced, they wait.
Activity = Literal["serving", "falling_asleep", "asleep", "waking", "reloading"]


class Configure(msgspec.Struct, frozen=True, tag="configure", array_like=True):
    """To the engine, first: what to load.

    If ``has_listener`` is set, a listening Unix socket comes with it, on which to accept more
    clients.
    """

    config: EngineConfig
    runner: str | None = None  # module:factory, if not the engine's own
    has_listener: bool = False


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """To the engine: queue these requests, in order."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """To the engine: end these requests; unknown ids are ignored."""

    ids: tuple[str, ...]


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile", array_like=True):
    """To the engine: record the next steps. It answers."""

    num_steps: int


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile", array_like=True):
    """To the engine: stop recording. It answers."""


class GetSnapshot(msgspec.Struct, frozen=True, tag="get_snapshot", array_like=True):
    """To the engine: send a snapshot. It answers, and records its steps for a while."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep", array_like=True):
    """To the engine: free memory once nothing runs. It answers when done."""

    level: int
    timeout_s: float  # after which running requests are ended


class Wake(msgspec.Struct, frozen=True, tag="wake", array_like=True):
    """To the engine: allocate the memory again. It answers when done."""


class Reload(msgspec.Struct, frozen=True, tag="reload", array_like=True):
    """To the engine: replace the weights once nothing runs. It answers when done."""

    model: str | None  # a directory; None: the current one
    timeout_s: float  # after which running requests are ended


class Ping(msgspec.Struct, frozen=True, tag="ping", array_like=True):
    """To the engine: is the process alive? Answered at once, even during a step."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """To the engine: exit after the step in flight."""


class Loading(msgspec.Struct, frozen=True, tag="loading", array_like=True):
    """From the engine: the progress of loading, 0 to 1."""

    fraction: float
    what: str


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """From the engine: it has loaded; later, that the model or its activity has changed."""

    info: EngineInfo
    activity: Activity = "serving"
    pid: int = msgspec.field(default_factory=os.getpid)  # the engine's


class Begun(msgspec.Struct, frozen=True, tag="begun", array_like=True):
    """From the engine: it begins to work on these requests, and might die of one.

    Those that it has ``withdrawn`` wait in its queue again.
    """

    ids: tuple[str, ...]
    withdrawn: tuple[str, ...] = ()


class Output(msgspec.Struct, frozen=True, tag="output", array_like=True):
    """From the engine: one step's output for the requests of this connection."""

    output: EngineOutput
    sent_s: float  # time.monotonic(); the newest of several clients' snapshots is the valid one


class ControlReply(msgspec.Struct, frozen=True, tag="control_reply", array_like=True):
    """From the engine: the reply to a control request. They are answered in order."""

    trace: Trace | None  # the one that a StopProfile has ended
    failure: Failure | None
    snapshot: Snapshot | None = None  # the one that a GetSnapshot has requested


class Pong(msgspec.Struct, frozen=True, tag="pong", array_like=True):
    """From the engine: the process is alive."""


class HungUp(msgspec.Struct, frozen=True, tag="hung_up", array_like=True):
    """From the engine, last: it goes on without this client, which did not read in time."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal", array_like=True):
    """From the engine, last: why it exits. ``kind`` is the error's class name."""

    message: str
    kind: str


LifecycleRequest = Sleep | Wake | Reload
ControlRequest = StartProfile | StopProfile | GetSnapshot | LifecycleRequest
ToEngine = Configure | Submit | Abort | ControlRequest | Ping | Shutdown
FromEngine = Loading | Ready | Begun | Output | ControlReply | Pong | HungUp | Fatal
Message = ToEngine | FromEngine

_decoder = msgspec.msgpack.Decoder(Message)


class FrameReader(Framing[Message]):
    """Decodes the messages above from a byte stream."""

    def __init__(self) -> None:
        super().__init__(_decoder)
