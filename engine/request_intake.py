"""What happens to requests before they reach the scheduler's queue.

    add ──► its images or audio are read ──► its grammar is compiled ──► the scheduler's queue
            engine/images/wait_queue.py       engine/grammar/wait_queue.py

Requests without any of these are queued at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.config import Policy
from engine.errors import Failure, InvalidParameter, RequestError
from engine.grammar.backend import CompiledGrammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.wait_queue import GrammarWaitQueue
from engine.images.wait_queue import ImageWaitQueue
from engine.monitor import EngineMonitor
from engine.runner.protocol import Runner, SupportsImagePrefetch
from engine.scheduler import Scheduler
from engine.snapshot import PhaseKind
from engine.types import Request


class RequestIntake:
    """The requests of an engine that are not queued yet. Used only by its thread, between steps.

    Args:
        scheduler: receives the requests.
        grammars: compiles the requests' grammars.
        policy: the queue's policy.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        policy: Policy,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._compiler = grammars
        self._clock = clock
        self._grammars = GrammarWaitQueue(grammars)
        self._images = ImageWaitQueue(
            policy, scheduler.num_cached_tokens, self._has_images_computed, clock
        )

    def __len__(self) -> int:
        return len(self._images) + len(self._grammars)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._images or request_id in self._grammars

    @property
    def is_busy(self) -> bool:
        """Whether ``admit_ready`` has to be called between steps."""
        return self._images.is_busy or bool(self._grammars)

    @property
    def has_ready(self) -> bool:
        """Whether ``admit_ready`` has something to do now."""
        return self._images.can_prefetch or self._grammars.has_ready

    @property
    def num_compiling(self) -> int:
        """How many requests have a grammar being compiled."""
        return len(self._grammars)

    def attach_runner(self, runner: Runner) -> None:
        """Let ``runner`` read images and audio if it can between steps. Nothing may be waiting."""
        self._images.attach_prefetcher(
            runner.image_prefetcher if isinstance(runner, SupportsImagePrefetch) else None
        )

    def requests(self) -> Iterator[tuple[Request, PhaseKind]]:
        """The requests held here, and what each waits for."""
        for request in self._grammars.requests():
            yield request, "grammar"
        for request in self._images.requests():
            yield request, _media_phase(request)

    def add(self, request: Request) -> None:
        """Queue a request as soon as it has what it needs.

        Raises:
            ContextLengthExceeded: it can never fit into the context or the KV cache.
            InvalidParameter: its prompt is empty, its id is in use, or its grammar is known to be
                unusable.
        """
        if request.id in self or request.id in self._scheduler.sequences:
            raise InvalidParameter(f"request id {request.id!r} is in use", param="id")
        if not self._images.try_hold(request):
            self._advance(request)
            return
        self._scheduler.report_waiting(request)
        if request.sampling.grammar is not None:
            self._compiler.compile(request.sampling.grammar)  # in parallel

    def admit_ready(self, monitor: EngineMonitor) -> None:
        """Read images and audio for a moment, and advance the requests whose waits are over.

        Raises:
            EngineDead: the device is lost.
        """
        for request, failure in self._images.run_slice():
            self._finish_wait(request, _media_phase(request), failure, monitor)
        for request, compiled, failure in self._grammars.take_ready():
            self._finish_wait(request, "grammar", failure, monitor, compiled)

    def discard(self, request_id: str) -> bool:
        """Drop a request that has been aborted; false if it is not here."""
        return self._images.discard(request_id) or self._grammars.discard(request_id)

    def clear(self) -> list[str]:
        """Drop all requests and return their ids."""
        return [*self._images.clear(), *self._grammars.clear()]

    def _finish_wait(
        self,
        request: Request,
        phase: PhaseKind,
        failure: Failure | None,
        monitor: EngineMonitor,
        compiled: CompiledGrammar | None = None,
    ) -> None:
        """Advance a request whose wait ``phase`` is over, or report its failure."""
        try:
            if failure is None and phase == "grammar":
                self._scheduler.add(request, compiled)
            elif failure is None:
                self._advance(request)
        except RequestError as error:
            failure = Failure.of(error)
        if monitor.is_recording:
            waits = request.id in self._grammars
            monitor.enter_phase(request, phase, "grammar" if waits else "queued", self._clock())
        if failure is not None:
            self._scheduler.finish_unqueued(request.id, failure)

    def _advance(self, request: Request) -> None:
        """Advance a request that has nothing to read, or for which it has been read."""
        if request.sampling.grammar is None:
            self._scheduler.add(request)
            return
        compiled = self._grammars.submit(request)
        if compiled is not None:
            self._scheduler.add(request, compiled)

    def _has_images_computed(self, request: Request) -> bool:
        if request.id in self._grammars:
            return False
        end = max(each.start + each.num_tokens for each in request.media)
        return self._scheduler.has_computed(request.id, end)


def _media_phase(request: Request) -> PhaseKind:
    return "images" if request.images else "audio"
