"""What the API layer and the offline ``LLM`` know of an engine, wherever it runs.

Four implementations: ``engine.inline.InlineClient`` (same process; offline use and tests),
``engine.process.SubprocessClient`` (a process of its own behind a socket pair; the server),
``engine.shared.SharedClient`` (the same process for several API workers) and
``engine.replicas.client.ReplicaClient`` (several of these as one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.frames import Activity
from engine.snapshot import Snapshot
from engine.types import (
    EngineInfo,
    EngineOutput,
    EngineStats,
    Request,
    RequestOutput,
    Trace,
)


class LoadProgress(Protocol):
    """Told while weights load: a share from 0 to 1 and what is being done."""

    def __call__(self, fraction: float, what: str) -> None:
        """Progress so far; called from whichever thread loads."""
        ...


class RequestStream(Protocol):
    """One request's outputs, for one consumer.

    A consumer that lags finds the steps it missed merged into one output, so a slow reader
    costs no queue.
    """

    @property
    def request_id(self) -> str:
        """The id it was submitted under."""
        ...

    async def next(self) -> RequestOutput:
        """The next output; the last one has a ``finish_reason``.

        Raises:
            RequestError: the engine refused the request.
            RequestFailed: the request failed through our own fault.
            EngineDead: the engine is gone.
            StopAsyncIteration: the last output has already been taken.
        """
        ...

    def abort(self) -> None:
        """Stop the request now; its blocks are free after the step in flight. Idempotent."""
        ...


class EngineClient(Protocol):
    """An engine to submit requests to. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded. Raises EngineDead before ``start`` has returned."""
        ...

    @property
    def members(self) -> Sequence[EngineClient]:
        """The engines behind it, by number: itself, unless it stands for several."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""
        ...

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted now."""
        ...

    @property
    def responds(self) -> bool:
        """Whether the engine's process is there and says so: not while it is stopped."""
        ...

    @property
    def activity(self) -> Activity:
        """What the engine does, as far as it has told: requests are served while it serves."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the engine has been given up for good: it will not be ``alive`` again."""
        ...

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model. Raises ModelLoadError or EngineDead."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue requests (a fork after the request it forks from). Raises EngineDead.

        Ids of requests still alive must not be used again.
        """
        ...

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        """Call ``listener`` with each step's output (metrics); it must be quick and not raise."""
        ...

    async def start_profile(self, num_steps: int) -> None:
        """Record the next ``num_steps`` steps, of everybody's requests.

        Raises:
            ProfileRefused: profiling is off, or a profile is being recorded.
            InvalidParameter: so many steps cannot be recorded.
            EngineDead: the engine is gone, or being restarted.
        """
        ...

    async def stop_profile(self) -> Trace:
        """End the recording, if it has not ended by itself.

        Raises:
            ProfileRefused: nothing was recorded by this engine process.
            RequestFailed: the trace could not be written.
            EngineDead: the engine is gone, or being restarted.
        """
        ...

    async def look(self) -> Snapshot:
        """The last steps, the requests and the KV blocks, as they stand between two steps.

        The engine records steps while somebody looks now and then, and a little longer; a look
        costs it O(blocks).

        Raises:
            EngineDead: the engine is gone, or being restarted.
        """
        ...

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Have the engine give memory back, once what it serves has ended; without effect while it
        sleeps.

        Level 1 gives back the KV cache and moves weights from a GPU to the host; level 2 gives them
        back too. Requests are refused from now on, until ``wake``; those that are being served
        raise EngineAsleep after ``timeout_s`` seconds.

        Raises:
            EngineDead: the engine is gone, or being restarted.
        """
        ...

    async def wake(self) -> None:
        """Have it take the memory again, and read its weights where they were given back; without
        effect while it is awake.

        Raises:
            EngineAsleep: it cannot: there is no memory, or the weights cannot be read.
            EngineDead: the engine is gone, or being restarted.
        """
        ...

    async def reload(self, model: str | None, timeout_s: float) -> EngineInfo:
        """Have it go on with the weights in the directory ``model`` (None: in that of those it
        has), once what it serves has ended; requests that come meanwhile wait for them.

        Those that are being served raise EngineAsleep after ``timeout_s`` seconds.

        Raises:
            InvalidParameter: they cannot be read, or are another model's; the old ones serve on.
            RestRefused: the engine is asleep.
            EngineDead: the engine is gone, or being restarted.
        """
        ...

    async def close(self) -> None:
        """End the engine and free what it holds. Requests alive raise EngineDead. Idempotent."""
        ...
