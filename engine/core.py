"""The engine: a scheduler, a runner, and the step that joins them.

    plan = scheduler.schedule()            # pure bookkeeping
    result = runner.launch(plan).result()  # tensors only
    output = scheduler.update(plan, result)

With overlap, the next step is planned and launched before the result of this one is awaited, so the
device never waits for the bookkeeping:

    host    schedule 2, launch 2 | update 1 | schedule 3, launch 3 | update 2 | ...
    device        step 1         |         step 2         |         step 3    | ...

The engine is synchronous and single-threaded. Its driver (``engine/loop.py`` for clients, the
offline ``LLM`` itself) calls ``step`` while ``has_work``.
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
from engine.config import EngineConfig
from engine.errors import EngineAsleep, EngineDead, Failure, SleepRefused
from engine.gc_tuning import collect_all
from engine.grammar.backend import CompiledGrammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.load import load_backend
from engine.isolation import run_isolated
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.pool import BlockPool
from engine.kv_cache.snapshots import SnapshotPool
from engine.limits import atomic_image_cell, max_steps_in_flight, step_limits
from engine.monitor import EngineMonitor
from engine.pass_budget import PassBudget
from engine.profiler import Profiler, Spans
from engine.prompt_budget import PromptBudget
from engine.request_checks import check_kind, check_tokens
from engine.request_intake import OnBegin, RequestIntake
from engine.runner.null_runner import NullRunner
from engine.runner.protocol import LaunchedStep, Runner, SleepingRunner
from engine.scheduler import Scheduler
from engine.snapshot import Snapshot
from engine.speculation.speculator import Speculator
from engine.stats import EngineStats
from engine.types import EngineInfo, EngineOutput, Grammar, Request, StepPlan, StepResult

logger = logging.getLogger(__name__)

# While the engine is never idle, one piece of preparatory work is done every so many steps.
_PREPARE_INTERVAL_STEPS = 32
# How often to check whether a grammar is compiled when there is nothing else to do.
_GRAMMAR_POLL_S = 0.001


class _InFlightStep(NamedTuple):
    """A step in flight: launched, but with its result not yet processed."""

    plan: StepPlan
    launched: LaunchedStep | None  # None: the launch failed
    began_s: float  # launch time


class EngineCore:
    """Serves requests, one step at a time.

    Args:
        config: provides the scheduler's limits, and whether prefixes are cached.
        runner: a loaded model; block counts and lengths come from its ``info``.
        clock: monotonic seconds, comparable with ``Request.arrival_s``.
        grammars: compiles the requests' grammars; default: with llguidance.
        speculator: proposes drafts; default: as ``config`` says.
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
        self.on_begin: OnBegin = lambda begun, withdrawn: None  # may be replaced before any request
        self._sleeping_runner: SleepingRunner | None = None  # set while the engine is asleep
        self._has_nodes = config.nodes is not None
        num_snapshots = info.memory.num_snapshots
        self._pool = BlockPool(
            info.memory.num_blocks,
            info.memory.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching
            and not info.unchunked_prefill
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
            atomic_image_cell=atomic_image_cell(info),
        )
        self._speculator = speculator
        self._window = BatchingWindow(limits)
        self._pass_budget = PassBudget(limits.max_step_passes or 1)
        self._prompt_budget = PromptBudget(limits)
        self._takes_turns = limits.num_micro_batches == 1  # a step begins when the one before ends
        self._finished_s = clock()  # when the last result came
        if grammars is None:
            grammars = GrammarCompiler(partial(load_backend, config, info))
        self._grammars = grammars
        self._intake = RequestIntake(
            self._scheduler,
            grammars,
            limits.policy,
            clock,
            lambda begun, withdrawn: self.on_begin(begun, withdrawn),
        )
        self._intake.attach_runner(runner)
        self._monitor = EngineMonitor(self._scheduler, self._pool, self._intake.requests)
        self._in_flight: deque[_InFlightStep] = deque()  # oldest first
        self._depth = max_steps_in_flight(config, info)
        self._has_adapters = False  # whether any request ever had one
        self._is_prepared = False
        self._num_until_prepare = _PREPARE_INTERVAL_STEPS
        self._stats = self._scheduler.stats()
        self._spans = Spans()
        self._profiler = Profiler(config.profile_dir, info.device, self._spans)
        runner.set_spans(self._spans)

    @classmethod
    def load(cls, config: EngineConfig, on_progress: LoadProgress | None = None) -> EngineCore:
        """Load the model that ``config`` names. Raises ModelLoadError."""
        from engine.runner import load_runner  # imports the tensor library

        return cls(config, load_runner(config, on_progress))

    @property
    def info(self) -> EngineInfo:
        """A description of the loaded model."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The snapshot after the last step."""
        return self._stats

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has released its memory and needs ``wake`` before it can compute."""
        return self._sleeping_runner is not None

    @property
    def profiler(self) -> Profiler:
        """Records steps as a trace. Call it only between steps."""
        return self._profiler

    def snapshot(self) -> Snapshot:
        """Recent steps, requests and blocks. Steps are recorded while this is called regularly."""
        return self._monitor.snapshot(self._clock())

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to compute or to report."""
        return self._scheduler.has_work or bool(self._in_flight) or bool(self._intake)

    @property
    def idle_s(self) -> float:
        """Seconds for which a step would have nothing to do although there is work.

        This is so while nothing runs and either the batching window is open, or all requests wait
        for their grammars.
        """
        if self._scheduler.num_running or self._scheduler.has_pending_output or self._in_flight:
            return 0.0
        if self._intake:
            if self._intake.has_ready:
                return 0.0
            if not self._scheduler.has_work:
                return _GRAMMAR_POLL_S
        return self._window.remaining_s(self._scheduler, self._clock())

    def add(self, request: Request) -> None:
        """Queue a request once its images are encoded and its grammar is compiled, if it has any.

        Raises:
            ContextLengthExceeded: it can never fit into the context or the KV cache.
            InvalidParameter: it has tokens outside the vocabulary, an empty prompt, an id in use, a
                grammar known to be unusable, an unusable adapter, or a kind that this model does
                not serve.
            EngineAsleep: the engine is asleep.
        """
        if self._sleeping_runner is not None:
            raise EngineAsleep("the engine is asleep; wake it first")
        check_kind(request, self._info)
        check_tokens(request, self._info.vocab_size)
        if request.adapter is not None:
            self._has_adapters, self._is_prepared = True, False
        self._intake.add(request)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar synchronously. Raises InvalidParameter if it cannot be compiled."""
        return self._grammars.compile(grammar).result()

    def abort(self, request_id: str) -> None:
        """End a request; the next output reports it. Unknown ids are ignored."""
        if self._intake.discard(request_id):
            self._scheduler.finish_unqueued(request_id, None)
        else:
            self._scheduler.abort(request_id, self._clock())

    def fail_all(self, failure: Failure) -> None:
        """End every request with ``failure``; the next output reports it."""
        for request_id in self._intake.clear():
            self._scheduler.finish_unqueued(request_id, failure)
        self._scheduler.fail_all(failure, self._clock())

    def check_can_sleep(self) -> None:
        """Raise SleepRefused if this engine can never sleep, whatever it is doing."""
        if self._has_nodes:
            raise SleepRefused("Ranks on several machines do not sleep.", code="several_machines")

    def sleep(self, level: int) -> None:
        """Free the memory of the KV cache and of captured steps, and drop all cached prefixes.

        On a CPU the weights stay in memory; from a GPU they move to host memory. At level 2 they
        are freed too. No requests are accepted until ``wake``.

        Raises:
            SleepRefused: there is work, or the engine is already asleep.
        """
        self._sleeping_runner = self._put_runner_to_sleep(level)
        logger.info("asleep at level %d", level)

    def wake(self) -> None:
        """Allocate the memory again, and reload the weights if they were freed.

        Raises:
            SleepRefused: the engine is not asleep.
            ModelLoadError: waking failed; the engine stays asleep.
        """
        if self._sleeping_runner is None:
            raise SleepRefused("The engine is not asleep.", code="not_asleep")
        self._attach_runner(self._sleeping_runner.wake())
        self._sleeping_runner = None
        logger.info("awake")

    def reload(self, model: str) -> None:
        """Replace the weights by those of the same model in the directory ``model``.

        All cached prefixes are dropped. While the new weights load, both sets are in memory, but
        the KV cache is not.

        Raises:
            SleepRefused: there is work, or the engine is asleep.
            ModelLoadError: the new weights cannot be used; the old ones continue to serve.
        """
        sleeping = self._put_runner_to_sleep(0)
        self._sleeping_runner = sleeping  # until there is a runner again
        try:
            fresh = sleeping.with_weights(model)
        except Exception as error:  # including out of memory
            if not isinstance(error, EngineDead):
                self.wake()
            raise
        self._sleeping_runner = fresh
        del sleeping
        collect_all()  # frees the old weights before the KV cache is allocated again
        fresh.release()
        self.wake()
        logger.info("weights replaced, generation %d", self._info.generation)

    def step(self) -> EngineOutput:
        """Launch what can be launched, and process the result of the oldest step in flight.

        A row that fails ends with an error in the output and does not affect the others.

        Raises:
            EngineDead: the device is lost.
        """
        if self._intake.is_busy:
            self._admit_ready()
        self._scheduler.set_num_unqueued(len(self._intake))
        began_s = self._clock()
        with self._spans("step"):
            while len(self._in_flight) < self._depth and self._launch():
                pass
            with self._spans("output"):
                flight = self._in_flight[0] if self._in_flight else None
                plan = None if flight is None else flight.plan
                output = self._scheduler.flush_output() if plan is None else self._finish_oldest()
        if self._speculator is not None and plan is not None:
            self._speculator.observe(plan, self._clock() - began_s)
        if self._monitor.is_recording:
            launched_s = began_s if flight is None else flight.began_s
            self._monitor.record_step(plan, launched_s, output, self._clock())
        self._stats = output.stats
        self._profiler.count_step()
        self._prepare_periodically()
        return output

    def prepare(self) -> bool:
        """Let the runner do a piece of work that speeds up later steps; false if none is left.

        To be called when there is nothing else to do. Before the first step it does nothing, so as
        not to delay the first answer.
        """
        if self._is_prepared or not self._stats.num_steps:
            return False
        remains = self._runner.prepare()
        # Steps with adapters are captured when these have come, and again when they have moved.
        self._is_prepared = not remains and not self._has_adapters
        return remains

    def check(self) -> list[str]:
        """Check the block pool's bookkeeping; returns and logs the problems found.

        Costs O(blocks), so call it only when idle.
        """
        problems = self._pool.check(self._scheduler.tables)
        for problem in problems:
            logger.critical("the KV block pool is corrupt: %s", problem)
        return problems

    def _put_runner_to_sleep(self, level: int) -> SleepingRunner:
        """Shut the runner down and return what it leaves behind."""
        self.check_can_sleep()
        if self.has_work:
            raise SleepRefused("Requests are being served.", code="busy")
        if self._sleeping_runner is not None:
            raise SleepRefused("The engine is asleep; wake it first.", code="asleep")
        sleeping = self._runner.sleep(level)
        self._runner = NullRunner(self._info)
        self._intake.attach_runner(self._runner)
        self._pool.reset_prefix_cache()
        collect_all()
        sleeping.release()
        return sleeping

    def _attach_runner(self, runner: Runner) -> None:
        """Install a runner that holds no sequences."""
        self._runner, self._info = runner, runner.info
        self._intake.attach_runner(runner)
        runner.set_spans(self._spans)
        self._is_prepared = False

    def _admit_ready(self) -> None:
        """Advance the waiting requests' images and grammars, and queue those that are ready."""
        began_s = self._clock()
        with self._spans("admit"):
            self._intake.admit_ready(self._monitor)
        spent_s = self._clock() - began_s
        # Do not count this time as part of the steps in flight: on a CPU they make no progress
        # meanwhile.
        flights = (flight._replace(began_s=flight.began_s + spent_s) for flight in self._in_flight)
        self._in_flight = deque(flights)

    def _launch(self) -> bool:
        """Plan and launch a step; false if there is none, or an earlier one must finish first."""
        if self._in_flight and self._in_flight[-1].launched is None:
            return False  # its rows have to be replayed first
        scheduler = self._scheduler
        with self._spans("schedule"):
            now_s = self._clock()
            admit = self._window.remaining_s(scheduler, now_s) <= 0.0
            passes = self._pass_budget.max_passes(scheduler.num_running)
            if self._intake.num_compiling or scheduler.num_waiting:
                passes = 1
            prompt_tokens = self._prompt_budget.max_prompt_tokens(scheduler.num_running)
            plan = scheduler.schedule(
                admit, now_s, max_passes=passes, max_prompt_tokens=prompt_tokens
            )
        if not scheduler.num_waiting:
            self._window.close()
        if plan.is_empty:
            return False
        if plan.added or plan.num_preempted:
            self.on_begin([added.request.id for added in plan.added], scheduler.preempted(plan))
        launched: LaunchedStep | None = None
        began_s = self._clock()
        try:
            launched = self._runner.launch(plan)
        except EngineDead:
            raise
        except Exception:
            logger.exception("a step of %d rows could not be started", len(plan.rows))
        self._in_flight.append(_InFlightStep(plan, launched, began_s))
        return True

    def _finish_oldest(self) -> EngineOutput:
        """Await the oldest step in flight and process its result."""
        plan, launched, began_s = self._in_flight.popleft()
        result: StepResult | None = None
        if launched is not None:
            try:
                result = launched.result()
            except EngineDead:
                raise
            except Exception:
                logger.exception("a step of %d rows failed", len(plan.rows))
                self._invalidate_in_flight()
        if result is None:
            result = run_isolated(self._runner, self._scheduler, plan)
        else:
            now_s = self._clock()
            self._pass_budget.observe(plan.rows, result, now_s - began_s)
            if self._takes_turns:  # also one that was launched long before its turn
                began_s = max(began_s, self._finished_s)
            self._prompt_budget.observe(plan.rows, now_s - began_s)
        self._finished_s = self._clock()
        return self._scheduler.update(plan, result, self._finished_s)

    def _invalidate_in_flight(self) -> None:
        """Void the steps launched after a failed one, since they read what it did not write."""
        for index, (plan, launched, began_s) in enumerate(self._in_flight):
            if launched is not None:
                try:
                    launched.result()
                except EngineDead:
                    raise
                except Exception:
                    logger.info("a later step failed as well")
            self._in_flight[index] = _InFlightStep(plan, None, began_s)

    def _prepare_periodically(self) -> None:
        self._num_until_prepare -= 1
        if self._num_until_prepare <= 0:
            self._num_until_prepare = _PREPARE_INTERVAL_STEPS
            self.prepare()
