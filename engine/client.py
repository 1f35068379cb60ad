"""The interface of an engine to the API layer and the offline ``LLM``, wherever it runs.

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
from engine.stats import EngineStats
from engine.types import EngineInfo, EngineOutput, Request, RequestOutput, Trace


class LoadProgress(Protocol):
    """Called while weights load, with the fraction done (0 to 1) and the current activity."""

    def __call__(self, fraction: float, what: str) -> None:
        """Report progress; called from the loading thread."""
        ...


class RequestStream(Protocol):
    """One request's outputs, for one consumer.

    A consumer that lags finds the steps it missed merged into one output, so a slow reader
    costs no queue.
    """

    @property
    def request_id(self) -> str:
        """The id under which it was submitted."""
        ...

    async def next(self) -> RequestOutput:
        """The next output; the last one has a ``finish_reason``.

        Raises:
            RequestError: the engine refused the request.
            RequestFailed: the request failed through the server's own fault.
            EngineDead: the engine is gone.
            StopAsyncIteration: the last output has already been taken.
        """
        ...

    def abort(self) -> None:
        """Stop the request now; its blocks are freed after the step in flight. Idempotent."""
        ...


class EngineClient(Protocol):
    """An engine to submit requests to. All methods belong to one event loop."""

    @property
    def info(self) -> EngineInfo:
        """A description of the loaded model. Raises EngineDead before ``start`` has returned."""
        ...

    @property
    def members(self) -> Sequence[EngineClient]:
        """The engines behind this client, by number; just itself unless it stands for several."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot of statistics."""
        ...

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted now."""
        ...

    @property
    def responsive(self) -> bool:
        """Whether the engine process answers; false while it is stopped."""
        ...

    @property
    def activity(self) -> Activity:
        """What the engine last reported to be doing; it serves requests only while serving."""
        ...

    @property
    def dead(self) -> bool:
        """Whether the engine has been given up: it will never be ``alive`` again."""
        ...

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Load the model. Raises ModelLoadError or EngineDead."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue requests; a fork must come after the request that it forks. Raises EngineDead.

        Ids of live requests must not be reused.
        """
        ...

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        """Call ``listener`` with each step's output (metrics); it must be quick and not raise."""
        ...

    async def start_profile(self, num_steps: int) -> None:
        """Record the next ``num_steps`` steps, which may serve any client's requests.

        Raises:
            ProfileRefused: profiling is off, or a profile is already being recorded.
            InvalidParameter: the number of steps is out of range.
            EngineDead: the engine is dead or restarting.
        """
        ...

    async def stop_profile(self) -> Trace:
        """End the recording, if it has not already ended.

        Raises:
            ProfileRefused: this engine process has recorded nothing.
            RequestFailed: the trace could not be written.
            EngineDead: the engine is dead or restarting.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Recent steps, live requests and KV blocks, as of a moment between two steps.

        The engine starts to record steps when this is called, and stops some time after the last
        call. A call costs it O(blocks).

        Raises:
            EngineDead: the engine is dead or restarting.
        """
        ...

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Let the engine free memory once its current requests have ended.

        Level 1 frees the KV cache and moves weights from a GPU to the host; level 2 frees the
        weights too. New requests are refused until ``wake``. Current requests are failed with
        EngineAsleep after ``timeout_s`` seconds. No effect if the engine is asleep.

        Raises:
            EngineDead: the engine is dead or restarting.
        """
        ...

    async def wake(self) -> None:
        """Let the engine allocate its memory again, and reload the weights if they were freed.

        No effect if the engine is awake.

        Raises:
            EngineAsleep: waking failed: there is no memory, or the weights cannot be read.
            EngineDead: the engine is dead or restarting.
        """
        ...

    async def reload(self, model: str | None, timeout_s: float) -> EngineInfo:
        """Replace the weights by those in the directory ``model`` once current requests have ended.

        With None they are read again from the current directory. New requests wait for the new
        weights. Current requests are failed with EngineAsleep after ``timeout_s`` seconds.

        Raises:
            InvalidParameter: the weights cannot be read, or belong to another model; the old ones
                continue to serve.
            SleepRefused: the engine is asleep.
            EngineDead: the engine is dead or restarting.
        """
        ...

    async def close(self) -> None:
        """Shut down and free all resources. Live requests raise EngineDead. Idempotent."""
        ...
