"""What happens to requests before they reach the scheduler's queue.

    add ──► its images or audio are read ──► its grammar is compiled ──► the scheduler's queue
            engine/images/wait_queue.py       engine/grammar/wait_queue.py

Requests without any of these are queued at once. The others keep the place in the order of arrival
that they had when they came, so they do not wait twice. Where engines may have died of a request,
all this is done for one after the other, as they are admitted
(``engine/scheduler/suspect_gate.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from engine.config import Policy
from engine.errors import DeadlineExceeded, EngineDead, Failure, InvalidParameter, RequestError
from engine.grammar.backend import CompiledGrammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.wait_queue import GrammarWaitQueue
from engine.images.wait_queue import ImageWaitQueue
from engine.monitor import EngineMonitor
from engine.runner.protocol import Runner, SupportsImagePrefetch
from engine.scheduler import Scheduler
from engine.snapshot import PhaseKind
from engine.types import Adapter, Request

logger = logging.getLogger(__name__)

# Receives the ids of requests that the engine begins to work on, and might die of, and the ids of
# those that it puts back into the queue (``engine/suspects.py``).
OnBegin = Callable[[Sequence[str], Sequence[str]], None]


class RequestIntake:
    """The requests of an engine that are not queued yet. Used only by its thread, between steps.

    Args:
        scheduler: receives the requests.
        grammars: compiles the requests' grammars.
        policy: the queue's policy.
        clock: monotonic seconds.
        on_begin: called before work on requests begins here, and after it, when they are put back.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        policy: Policy,
        clock: Callable[[], float],
        on_begin: OnBegin = lambda begun, withdrawn: None,
    ) -> None:
        self._scheduler = scheduler
        self._compiler = grammars
        self._clock = clock
        self._on_begin = on_begin
        self._runner: Runner | None = None
        self._adapters: set[str] = set()  # ids of those that the runner has loaded
        self._suspects: dict[str, Request] = {}  # nothing has been done for these yet
        self._places: dict[str, int] = {}  # in the order of arrival, of the requests held here
        self._grammars = GrammarWaitQueue(grammars)
        self._images = ImageWaitQueue(
            policy, scheduler.num_cached_tokens, self._has_images_computed, clock
        )

    def __len__(self) -> int:
        return len(self._suspects) + len(self._images) + len(self._grammars)

    def __contains__(self, request_id: str) -> bool:
        waits = request_id in self._images or request_id in self._grammars
        return waits or request_id in self._suspects

    @property
    def is_busy(self) -> bool:
        """Whether ``admit_ready`` has to be called between steps."""
        return self._images.is_busy or bool(self._grammars or self._suspects)

    @property
    def has_ready(self) -> bool:
        """Whether ``admit_ready`` has something to do now."""
        ready = self._images.can_prefetch or self._grammars.has_ready
        return ready or bool(self._suspects and self._has_room_for_suspect)

    @property
    def num_compiling(self) -> int:
        """How many requests have a grammar being compiled."""
        return len(self._grammars)

    def attach_runner(self, runner: Runner) -> None:
        """Let ``runner`` load adapters, and read images and audio if it can between steps.

        Nothing may be waiting.
        """
        self._runner = runner
        self._adapters.clear()
        self._images.attach_prefetcher(
            runner.image_prefetcher if isinstance(runner, SupportsImagePrefetch) else None
        )

    def requests(self) -> Iterator[tuple[Request, PhaseKind]]:
        """The requests held here, and what each waits for."""
        for request in self._grammars.requests():
            yield request, "grammar"
        for request in self._images.requests():
            yield request, _media_phase(request)
        for request in self._suspects.values():
            yield request, "queued"

    def add(self, request: Request) -> None:
        """Queue a request as soon as it has what it needs.

        Raises:
            ContextLengthExceeded: it can never fit into the context or the KV cache.
            InvalidParameter: its prompt is empty, its id is in use, its grammar is known to be
                unusable, or its adapter cannot be used.
        """
        if request.id in self or request.id in self._scheduler.sequences:
            raise InvalidParameter(f"request id {request.id!r} is in use", param="id")
        if not _needs_work(request):
            self._scheduler.add(request)
            return
        self._places[request.id] = self._scheduler.take_place()
        if request.is_suspect:
            self._suspects[request.id] = request
            return
        try:
            self._begin_wait(request)
        except BaseException:
            del self._places[request.id]
            raise

    def admit_ready(self, monitor: EngineMonitor) -> None:
        """Read images and audio for a moment, and advance the requests whose waits are over.

        Raises:
            EngineDead: the device is lost.
        """
        if self._suspects:
            self._expire_suspects()
        while self._suspects and self._has_room_for_suspect:
            self._release_suspect()
        for request, failure in self._images.run_slice():
            self._finish_wait(request, _media_phase(request), failure, monitor)
        for request, compiled, failure in self._grammars.take_ready():
            self._finish_wait(request, "grammar", failure, monitor, compiled)

    def discard(self, request_id: str) -> bool:
        """Drop a request that has been aborted; false if it is not here."""
        if request_id not in self:
            return False
        del self._places[request_id]
        if self._suspects.pop(request_id, None) is not None:
            return True
        return self._images.discard(request_id) or self._grammars.discard(request_id)

    def clear(self) -> list[str]:
        """Drop all requests and return their ids."""
        suspects = list(self._suspects)
        self._suspects.clear()
        self._places.clear()
        return [*suspects, *self._images.clear(), *self._grammars.clear()]

    @property
    def _has_room_for_suspect(self) -> bool:
        """Whether the work on another suspect may begin: no other is on its way to the queue."""
        held = (request for request, _ in self.requests())
        is_busy = any(each.is_suspect and each.id not in self._suspects for each in held)
        return not is_busy and self._scheduler.has_room_for_suspect

    def _expire_suspects(self) -> None:
        now_s = self._clock()
        for request in list(self._suspects.values()):
            if request.deadline_s is not None and request.deadline_s <= now_s:
                del self._suspects[request.id]
                self._fail(request, Failure.of(DeadlineExceeded()))

    def _release_suspect(self) -> None:
        request = self._suspects.pop(next(iter(self._suspects)))
        try:
            self._begin_wait(request)
        except EngineDead:
            raise
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("request %s could not be queued", request.id)
            self._fail(request, Failure.of(error))

    def _begin_wait(self, request: Request) -> None:
        """Queue a request as soon as it has what it needs. Raises as ``add`` does."""
        if request.adapter is not None:
            self._load_adapter(request, request.adapter)
        if self._images.try_hold(request):
            self._scheduler.report_waiting(request)
            if request.sampling.grammar is not None:
                self._compiler.compile(request.sampling.grammar)  # in parallel
        else:
            self._advance(request)
        if request.id in self:
            self._on_begin((request.id,), ())

    def _load_adapter(self, request: Request, adapter: Adapter) -> None:
        assert self._runner is not None
        is_new = adapter.id not in self._adapters
        if is_new:
            self._on_begin((request.id,), ())
        self._runner.load_adapter(adapter)
        if is_new:
            self._adapters.add(adapter.id)
            self._on_begin((), (request.id,))

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
                self._queue(request, compiled)
            elif failure is None:
                self._advance(request)
        except RequestError as error:
            failure = Failure.of(error)
        if monitor.is_recording:
            waits = request.id in self._grammars
            monitor.enter_phase(request, phase, "grammar" if waits else "queued", self._clock())
        if failure is not None:
            self._fail(request, failure)
        elif request.id not in self:
            self._on_begin((), (request.id,))

    def _advance(self, request: Request) -> None:
        """Advance a request that has nothing to read, or for which it has been read."""
        if request.sampling.grammar is None:
            self._queue(request)
            return
        compiled = self._grammars.submit(request)
        if compiled is not None:
            self._queue(request, compiled)

    def _queue(self, request: Request, compiled: CompiledGrammar | None = None) -> None:
        """Pass a request on, to its place. Raises as ``add`` does."""
        self._scheduler.add(request, compiled, self._places[request.id])
        del self._places[request.id]

    def _fail(self, request: Request, failure: Failure) -> None:
        del self._places[request.id]
        self._scheduler.finish_unqueued(request.id, failure)

    def _has_images_computed(self, request: Request) -> bool:
        if request.id in self._grammars:
            return False
        end = max(each.start + each.num_tokens for each in request.media)
        return self._scheduler.has_computed(request.id, end)


def _needs_work(request: Request) -> bool:
    """Whether anything is done for a request before it is queued."""
    return bool(request.media or request.adapter or request.sampling.grammar)


def _media_phase(request: Request) -> PhaseKind:
    return "images" if request.images else "audio"
