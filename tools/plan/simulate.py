"""Runs traffic through an engine in simulated time.

The core is the one that serves (``engine/core.py``), with its scheduler, passes and overlapping.
Its clock is a number, and its runner computes when each step would be done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import ContextLengthExceeded, InvalidParameter, RequestError, SleepRefused
from engine.profiler import Spans
from engine.runner.protocol import LaunchedStep, SleepingRunner
from engine.types import (
    Adapter,
    EngineInfo,
    MemoryPlan,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
)
from tools.plan.cost import Cost, StepShape, stages_s
from tools.plan.traffic import Arrival

_VOCAB = 1 << 20  # token ids to distinguish prompts; nothing is computed with them
_TOKEN = 0


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its capacity, and the cost of its steps."""

    name: str
    device: str  # "cpu" or "cuda": determines the scheduler's defaults
    num_blocks: int
    block_size: int
    max_model_len: int
    cost: Cost
    scheduler: SchedulerConfig = SchedulerConfig()
    enable_prefix_caching: bool = True
    num_states: int = 0  # sequences that may run at once, if layers keep a state for each
    num_snapshots: int = 0  # of states, for prompts with a common prefix
    tensor_parallel_size: int = 1  # ranks per stage
    pipeline_parallel_size: int = 1  # stages

    @property
    def num_ranks(self) -> int:
        """The number of devices it takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class Outcome(NamedTuple):
    """One request that was served; times in seconds."""

    ttft_s: float
    tpot_s: float | None  # None with a single output token
    e2e_s: float
    num_preemptions: int


class SimulationResult(NamedTuple):
    """The results of the simulation."""

    outcomes: list[Outcome]
    num_rejected: int  # requests that could never fit
    duration_s: float
    num_steps: int
    num_output: int  # tokens


class Clock:
    """A clock that only advances when it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The current time."""
        return self.now_s


class CostRunner:
    """A runner that computes nothing, and advances the clock by the time of each step.

    Steps run one after another on a device, however early they are launched. With several stages,
    each step passes through them in order, and each stage runs one step at a time.
    """

    def __init__(self, info: EngineInfo, cost: Cost, clock: Clock, num_stages: int = 1) -> None:
        self._info = info
        self._cost = cost
        self._clock = clock
        self._free_s = [0.0] * num_stages  # when each stage finishes the steps it was given

    @property
    def info(self) -> EngineInfo:
        """The sizes of the engine, without weights."""
        return self._info

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step that starts when the previous one ends."""
        rows = plan.rows
        end_s = max(self._free_s[0], self._clock.now_s)
        if rows:
            taken_s = stages_s(self._cost, StepShape.of(rows))
            for stage, seconds in enumerate(taken_s):
                end_s = max(end_s, self._free_s[stage]) + seconds
                self._free_s[stage] = end_s
        places = [place for place in range(len(rows)) if place not in rows.unsampled]
        token_ids = tuple((_TOKEN,) * rows.num_passes.get(place, 1) for place in places)
        ids = tuple(rows.ids[place] for place in places)
        return _SimulatedStep(self._clock, end_s, StepResult(ids, token_ids, (None,) * len(ids)))

    def set_spans(self, spans: Spans) -> None:
        """Do nothing: a simulated step has no parts to mark."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Raise InvalidParameter: there is no model to adapt."""
        raise InvalidParameter("a simulated engine takes no adapters", param="model")

    def prepare(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def sleep(self, level: int) -> SleepingRunner:
        """Raise SleepRefused: a simulated engine does not rest."""
        raise SleepRefused("a simulated engine does not rest")


class _SimulatedStep:
    """A launched step that ends at a given time."""

    def __init__(self, clock: Clock, end_s: float, result: StepResult) -> None:
        self._clock = clock
        self._end_s = end_s
        self._result = result

    def result(self) -> StepResult:
        """Advance the clock to the end of the step and return its result."""
        self._clock.now_s = max(self._clock.now_s, self._end_s)
        return self._result


def simulate(replica: Replica, arrivals: Sequence[Arrival]) -> SimulationResult:
    """Serve ``arrivals``, which are ordered by time, until all have ended."""
    clock = Clock()
    core = _engine(replica, clock)
    waiting = deque(enumerate(arrivals))
    lengths: dict[str, int] = {}
    outcomes: list[Outcome] = []
    num_refused = num_output = 0
    while waiting or core.has_work:
        while waiting and waiting[0][1].at_s <= clock.now_s:
            index, arrival = waiting.popleft()
            try:
                if arrival.num_prompt >= replica.max_model_len:  # before it is built
                    raise ContextLengthExceeded("the prompt does not fit")
                core.add(_request(index, arrival))
            except RequestError:
                num_refused += 1
            else:
                lengths[f"{index}"] = arrival.num_output
                num_output += arrival.num_output
        if not core.has_work:
            if waiting:
                clock.now_s = max(clock.now_s, waiting[0][1].at_s)
            continue
        if idle_s := core.idle_s:
            clock.now_s += idle_s
            continue
        output = core.step()
        if output.errors:  # a limit that was not anticipated, or a bug
            raise RuntimeError(next(iter(output.errors.values())).message)
        for id_, reason in zip(output.ids, output.finish_reasons, strict=True):
            if reason is None:
                continue
            told, count = output.timings[id_], lengths.pop(id_)
            decode_s = told.finished_s - told.first_token_s
            outcomes.append(
                Outcome(
                    ttft_s=told.first_token_s - told.arrival_s,
                    tpot_s=decode_s / (count - 1) if count > 1 else None,
                    e2e_s=told.finished_s - told.arrival_s,
                    num_preemptions=told.num_preemptions,
                )
            )
    return SimulationResult(outcomes, num_refused, clock.now_s, core.stats.num_steps, num_output)


def _engine(replica: Replica, clock: Clock) -> EngineCore:
    config = EngineConfig(
        model=replica.name,
        scheduler=replica.scheduler,
        cache=CacheConfig(enable_prefix_caching=replica.enable_prefix_caching),
        tensor_parallel_size=replica.tensor_parallel_size,
        pipeline_parallel_size=replica.pipeline_parallel_size,
    )
    info = EngineInfo(
        model=replica.name,
        architecture="simulated",
        num_parameters=0,
        dtype="none",
        device=replica.device,
        attention_backend="none",
        vocab_size=_VOCAB,
        max_model_len=replica.max_model_len,
        eos_token_ids=(),
        memory=MemoryPlan(
            weights_bytes=0,
            kv_cache_bytes=0,
            free_bytes=0,
            bytes_per_token=0,
            num_blocks=replica.num_blocks,
            block_size=replica.block_size,
            max_model_len=replica.max_model_len,
            num_states=replica.num_states,
            num_snapshots=replica.num_snapshots,
        ),
        fingerprint="simulated",
        load_s=0.0,
        is_recurrent=replica.num_states > 0,
    )
    runner = CostRunner(info, replica.cost, clock, replica.pipeline_parallel_size)
    return EngineCore(config, runner, clock=clock)


def _request(index: int, arrival: Arrival) -> Request:
    """A request whose prompt shares its common prefix, and nothing else, with others."""
    own = arrival.num_prompt - arrival.num_shared
    prompt = (_TOKEN,) * arrival.num_shared + (1 + index % (_VOCAB - 1),) * own
    sampling = SamplingParams(max_tokens=arrival.num_output, ignore_eos=True, seed=index)
    return Request(
        id=f"{index}", prompt_token_ids=prompt, sampling=sampling, arrival_s=arrival.at_s
    )
