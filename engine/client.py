"""What the API layer and the offline ``LLM`` know of an engine, wherever it runs.

Three implementations: ``engine.inline.InlineClient`` (same process; offline use and tests),
``engine.process.SubprocessClient`` (a process of its own behind a socket pair; the server) and
``engine.shared.SharedClient`` (the same process for several API workers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.types import EngineInfo, EngineOutput, EngineStats, Request, RequestOutput, Trace


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

    async def close(self) -> None:
        """End the engine and free what it holds. Requests alive raise EngineDead. Idempotent."""
        ...
