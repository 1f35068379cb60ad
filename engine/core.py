"""The engine: a scheduler, a runner, and the step that joins them.

    plan = scheduler.schedule()            # pure bookkeeping
    result = runner.launch(plan).result()  # tensors only
    output = scheduler.update(plan, result)

Overlapped, the next plan is made and launched before the result of this one is waited for, so the
device never waits for the bookkeeping:

    host    schedule 2, launch 2 | update 1 | schedule 3, launch 3 | update 2 | ...
    device        step 1         |         step 2         |         step 3    | ...

Synchronous and single-threaded: whoever drives it (``engine/loop.py`` for the clients, the offline
``LLM`` itself) calls ``step`` while ``has_work``.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from engine.batching_window import BatchingWindow
from engine.client import LoadProgress
from engine.collector import reclaim
from engine.config import EngineConfig
from engine.entrance import Entrance
from engine.errors import EngineAsleep, EngineDead, Failure, RestRefused
from engine.fitness import check_kind, check_tokens
from engine.grammar.backend import CompiledGrammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.load import load_backend
from engine.isolation import run_isolated
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.pool import BlockPool
from engine.kv_cache.snapshots import SnapshotPool
from engine.limits import num_steps_ahead, step_limits, whole_cells
from engine.passes import PassPace
from engine.profiler import Profiler, Spans
from engine.prompt_pace import PromptPace
from engine.runner.no_runner import NoRunner
from engine.runner.protocol import Launched, Resting, Runner
from engine.scheduler import Scheduler
from engine.snapshot import Snapshot
from engine.speculation.speculator import Speculator
from engine.types import (
    EngineInfo,
    EngineOutput,
    EngineStats,
    Grammar,
    Request,
    StepPlan,
    StepResult,
)
from engine.watch import Watch

logger = logging.getLogger(__name__)

# Steps between two pieces of preparatory work while the engine is never idle.
_PREPARE_EVERY = 32
# Between two looks at whether a grammar is compiled, while there is nothing else to do.
_GRAMMAR_POLL_S = 0.001


class _Flight(NamedTuple):
    """A step whose result has not been taken in."""

    plan: StepPlan
    launched: Launched | None  # None: it could not be launched
    began_s: float  # when it was to be launched


class EngineCore:
    """Continues requests, a step at a time.

    Args:
        config: the scheduler's limits and whether prefixes are cached are read from it.
        runner: a loaded model; the blocks and lengths come from its ``info``.
        clock: monotonic seconds, comparable with ``Request.arrival_s``.
        grammars: compiles those of requests; llguidance's when left out.
        speculator: guesses tokens ahead; what ``config`` asks for when left out.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._info = info = runner.info
        self._resting: Resting | None = None  # while the engine is asleep
        self._has_nodes = config.nodes is not None
        num_snapshots = info.memory.num_snapshots
        self._pool = BlockPool(
            info.memory.num_blocks,
            info.memory.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching
            and not info.whole_prompts
            and bool(num_snapshots or not info.is_recurrent),
            max_idle=info.memory.max_idle_blocks,
            tier=HostTier(info.memory.num_host_blocks) if info.memory.num_host_blocks else None,
            snapshots=SnapshotPool(num_snapshots) if num_snapshots else None,
        )
        limits = step_limits(config, info)
        if speculator is None and config.speculation is not None:
            speculator = Speculator(config.speculation)
        self._scheduler = Scheduler(
            limits,
            self._pool,
            max_model_len=info.max_model_len,
            window=info.window,
            recurrent=info.is_recurrent,
            eos_token_ids=info.eos_token_ids,
            speculator=speculator,
            whole_images=whole_cells(info),
        )
        self._speculator = speculator
        self._window = BatchingWindow(limits)
        self._passes = PassPace(limits.max_step_passes or 1)
        self._prompts = PromptPace(limits)
        if grammars is None:
            grammars = GrammarCompiler(partial(load_backend, config, info))
        self._grammars = grammars
        self._entrance = Entrance(self._scheduler, grammars, limits.policy, clock)
        self._entrance.seat(runner)
        self._watch = Watch(self._scheduler, self._pool, self._entrance.requests)
        self._flights: deque[_Flight] = deque()  # oldest first
        self._depth = num_steps_ahead(config, info)
        self._is_prepared = False
        self._num_until_prepare = _PREPARE_EVERY
        self._stats = self._scheduler.stats()
        self._spans = Spans()
        self._profiler = Profiler(config.profile_dir, info.device, self._spans)
        runner.mark(self._spans)

    @classmethod
    def load(cls, config: EngineConfig, on_progress: LoadProgress | None = None) -> EngineCore:
        """An engine with the model that ``config`` names. Raises ModelLoadError."""
        from engine.runner import load_runner  # brings the tensor library with it

        return cls(config, load_runner(config, on_progress))

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The snapshot after the last step."""
        return self._stats

    @property
    def is_asleep(self) -> bool:
        """Whether there is no memory to compute in, until ``wake``."""
        return self._resting is not None

    @property
    def profiler(self) -> Profiler:
        """Records steps into a trace; to be called between them."""
        return self._profiler

    def look(self) -> Snapshot:
        """The last steps, the requests and the blocks; steps are recorded while somebody looks."""
        return self._watch.look(self._clock())

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to compute or to tell."""
        return self._scheduler.has_work or bool(self._flights) or bool(self._entrance)

    @property
    def idle_s(self) -> float:
        """Seconds for which a step would find nothing to do, though there is work: the batching
        window is open and nobody runs, or nobody is there but those who wait for their grammar.
        """
        if self._scheduler.num_running or self._scheduler.has_news or self._flights:
            return 0.0
        if self._entrance:
            if self._entrance.is_open:
                return 0.0
            if not self._scheduler.has_work:
                return _GRAMMAR_POLL_S
        return self._window.remaining_s(self._scheduler, self._clock())

    def add(self, request: Request) -> None:
        """Queue a request, as soon as its images are read and its grammar is compiled where it has
        any.

        Raises:
            ContextLengthExceeded: it can never fit the context or the KV cache.
            InvalidParameter: it names tokens that the model does not have, its prompt is empty,
                its id is in use, its grammar is known not to work, its adapter cannot be used, or
                the model is of another kind.
            EngineAsleep: it sleeps.
        """
        if self._resting is not None:
            raise EngineAsleep("the engine is asleep; wake it first")
        check_kind(request, self._info)
        check_tokens(request, self._info.vocab_size)
        if request.adapter is not None:
            self._runner.load_adapter(request.adapter)
        self._entrance.add(request)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar now, whoever waits. Raises InvalidParameter when it cannot be."""
        return self._grammars.compile(grammar).result()

    def abort(self, request_id: str) -> None:
        """End a request; the next output says so. An unknown id is no error."""
        if self._entrance.discard(request_id):
            self._scheduler.turn_away(request_id, None)
        else:
            self._scheduler.abort(request_id, self._clock())

    def end_all(self, failure: Failure) -> None:
        """End every request with ``failure``; the next output says so."""
        for request_id in self._entrance.clear():
            self._scheduler.turn_away(request_id, failure)
        self._scheduler.end_all(failure, self._clock())

    def check_rest(self) -> None:
        """Raise RestRefused where this engine never rests, whatever it does now."""
        if self._has_nodes:
            raise RestRefused("Ranks on several machines do not sleep.", code="several_machines")

    def sleep(self, level: int) -> None:
        """Give back the memory of the KV cache and of what is captured, and forget all prefixes.

        Weights stay on a CPU and move from a GPU to the host's memory; at level 2 they are given
        back too. Requests cannot be added until ``wake``.

        Raises:
            RestRefused: there is work, or the engine is asleep.
        """
        self._resting = self._let_go(level)
        logger.info("asleep at level %d", level)

    def wake(self) -> None:
        """Take the memory again, and read the weights where they were given back.

        Raises:
            RestRefused: the engine is not asleep.
            ModelLoadError: that is not possible; it is asleep as before.
        """
        if self._resting is None:
            raise RestRefused("The engine is not asleep.", code="not_asleep")
        self._seat(self._resting.wake())
        self._resting = None
        logger.info("awake")

    def reload(self, model: str) -> None:
        """Go on with the weights in the directory ``model``, of the same model; prefixes are
        forgotten. Old and new ones are in memory side by side for as long as it takes to read them,
        without a KV cache beside them.

        Raises:
            RestRefused: there is work, or the engine is asleep.
            ModelLoadError: they cannot be used; the old ones serve on.
        """
        resting = self._let_go(0)
        self._resting = resting  # until there is a runner again
        try:
            fresh = resting.exchanged(model)
        except Exception as error:  # out of memory, too
            if not isinstance(error, EngineDead):
                self.wake()
            raise
        self._resting = fresh
        del resting
        reclaim()  # the old weights, before there is a KV cache again
        fresh.release()
        self.wake()
        logger.info("weights replaced, generation %d", self._info.generation)

    def step(self) -> EngineOutput:
        """Take in one step's result, once the next is under way, and tell what came of it.

        A row that fails ends with an error in the output, and the others do not notice.

        Raises:
            EngineDead: the device is lost.
        """
        if self._entrance.is_busy:
            self._let_in()
        self._scheduler.count_held(len(self._entrance))
        began_s = self._clock()
        with self._spans("step"):
            while len(self._flights) < self._depth and self._launch():
                pass
            with self._spans("output"):
                flight = self._flights[0] if self._flights else None
                plan = None if flight is None else flight.plan
                output = self._land() if self._flights else self._scheduler.tell()
        if self._speculator is not None and plan is not None:
            self._speculator.observe(plan, self._clock() - began_s)
        if self._watch.is_on:
            launched_s = began_s if flight is None else flight.began_s
            self._watch.take(plan, launched_s, output, self._clock())
        self._stats = output.stats
        self._profiler.count_step()
        self._prepare_now_and_then()
        return output

    def prepare(self) -> bool:
        """Let the runner do a piece of work that makes later steps quicker; whether it did.

        For a moment in which there is nothing else to do. The runner is not asked before the
        first step: no start waits for this.
        """
        if self._is_prepared or not self._stats.num_steps:
            return False
        self._is_prepared = not self._runner.prepare()
        return not self._is_prepared

    def check(self) -> list[str]:
        """What is wrong with the block pool's books, logged loudly; nothing if they are whole.

        Costs O(blocks): to be called when there is nothing else to do.
        """
        problems = self._pool.check(self._scheduler.tables)
        for problem in problems:
            logger.critical("the KV block pool is corrupt: %s", problem)
        return problems

    def _let_go(self, level: int) -> Resting:
        """End the runner; what it leaves behind."""
        self.check_rest()
        if self.has_work:
            raise RestRefused("Requests are being served.", code="busy")
        if self._resting is not None:
            raise RestRefused("The engine is asleep; wake it first.", code="asleep")
        resting = self._runner.rest(level)
        self._runner = NoRunner(self._info)
        self._entrance.seat(self._runner)
        self._pool.forget()
        reclaim()
        resting.release()
        return resting

    def _seat(self, runner: Runner) -> None:
        """Go on with a runner that knows no sequence."""
        self._runner, self._info = runner, runner.info
        self._entrance.seat(runner)
        runner.mark(self._spans)
        self._is_prepared = False

    def _let_in(self) -> None:
        """Queue those who have what they waited for, once more of it has been done."""
        began_s = self._clock()
        with self._spans("let in"):
            self._entrance.let_in(self._watch)
        spent_s = self._clock() - began_s
        # No part of what a step under way takes: on a CPU that stands still meanwhile.
        flights = (flight._replace(began_s=flight.began_s + spent_s) for flight in self._flights)
        self._flights = deque(flights)

    def _launch(self) -> bool:
        """Plan a step and start it; False when there is none, or it must wait for another."""
        if self._flights and self._flights[-1].launched is None:
            return False  # its rows are run again first
        scheduler = self._scheduler
        with self._spans("schedule"):
            now_s = self._clock()
            admit = self._window.remaining_s(scheduler, now_s) <= 0.0
            passes = self._passes.most(scheduler.num_running)
            if self._entrance.num_compiling or scheduler.num_waiting:
                passes = 1
            prompt_tokens = self._prompts.most(scheduler.num_running)
            plan = scheduler.schedule(
                admit, now_s, max_passes=passes, max_prompt_tokens=prompt_tokens
            )
        if not scheduler.num_waiting:
            self._window.close()
        if plan.is_empty:
            return False
        launched: Launched | None = None
        began_s = self._clock()
        try:
            launched = self._runner.launch(plan)
        except EngineDead:
            raise
        except Exception:
            logger.exception("a step of %d rows could not be started", len(plan.rows))
        self._flights.append(_Flight(plan, launched, began_s))
        return True

    def _land(self) -> EngineOutput:
        """Wait for the oldest step under way and take its result in."""
        plan, launched, began_s = self._flights.popleft()
        result: StepResult | None = None
        if launched is not None:
            try:
                result = launched.result()
            except EngineDead:
                raise
            except Exception:
                logger.exception("a step of %d rows failed", len(plan.rows))
                self._void_flights()
        if result is None:
            result = run_isolated(self._runner, self._scheduler, plan)
        else:
            seconds = self._clock() - began_s
            self._passes.observe(plan.rows, result, seconds)
            self._prompts.observe(plan.rows, seconds)
        return self._scheduler.update(plan, result, self._clock())

    def _void_flights(self) -> None:
        """What was launched behind a step that failed has read what that step did not write."""
        for index, (plan, launched, began_s) in enumerate(self._flights):
            if launched is not None:
                try:
                    launched.result()
                except EngineDead:
                    raise
                except Exception:
                    logger.info("a later step failed as well")
            self._flights[index] = _Flight(plan, None, began_s)

    def _prepare_now_and_then(self) -> None:
        self._num_until_prepare -= 1
        if self._num_until_prepare <= 0:
            self._num_until_prepare = _PREPARE_EVERY
            self.prepare()
