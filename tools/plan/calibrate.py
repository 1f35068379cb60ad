"""Measures the steps of a real model on this machine, and fits costs to them.

Requests of random lengths are kept in flight, at one concurrency after another, so that steps occur
as they do in service: with few and many rows, short and long contexts, with and without prompts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.profiler import Spans
from engine.requests import fan_out
from engine.runner import load_runner
from engine.runner.protocol import LaunchedStep, Runner, SleepingRunner
from engine.types import Adapter, EngineInfo, SamplingParams, StepPlan
from tools.plan.cost import NUM_COSTS, FitErrors, FittedCost, StepShape, fit
from tools.plan.simulate import Replica

_NUM_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_CONTEXTS = (32, 128, 512, 2048)  # approximate prompt lengths, in tokens
_STEPS = 60  # per case and round
_MAX_OUTPUT = 48


class Calibration(msgspec.Struct, frozen=True):
    """A measured replica, and how well the fitted costs match it."""

    replica: Replica
    fit: FitErrors
    dtype: str
    num_threads: int | None


class CalibrationError(ValueError):
    """A file is not a calibration; the message is one line that names it."""


def read_calibration(path: Path) -> Calibration:
    """Read a calibration from the file it was written to.

    Raises:
        CalibrationError: the file holds something else.
        OSError: it cannot be read.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: {error}") from None
    replica, costs = found.replica, found.replica.cost
    sizes = replica.num_blocks, replica.block_size, replica.max_model_len
    if min(*sizes, replica.tensor_parallel_size) < 1 or replica.pipeline_parallel_size != 1:
        raise CalibrationError(f"{path}: a replica without room for a request")
    if isinstance(costs, FittedCost) and not (
        len(costs.seconds) == NUM_COSTS and sum(costs.seconds) > 0 <= min(costs.seconds)
    ):
        raise CalibrationError(f"{path}: {NUM_COSTS} costs are wanted, none of them negative")
    return found


def calibrate(config: EngineConfig, seconds: float, on_progress: LoadProgress) -> Calibration:
    """Load the model that ``config`` names and measure its steps for about ``seconds``.

    Raises:
        ModelLoadError: it cannot be loaded, or does not generate.
        ValueError: there were too few steps in that time.
    """
    runner = _RecordingRunner(load_runner(config, on_progress))
    info = runner.info
    if not info.is_generative:
        raise ModelLoadError(f"{config.model}: the model does not generate text")
    core = EngineCore(config, runner)
    memory = info.memory
    most = config.scheduler.max_num_seqs
    cases = list(_cases(most, memory.num_blocks * memory.block_size, info.max_model_len))
    rng = random.Random(0)
    for num_rows in sorted({num_rows for num_rows, _ in cases}):
        _run(core, runner, num_rows, _CONTEXTS[0], rng)  # compile or capture first
    while core.prepare():
        pass
    runner.records.clear()
    begun_s = time.perf_counter()
    while (spent_s := time.perf_counter() - begun_s) < seconds:
        for num_rows, context in cases:
            spent_s = time.perf_counter() - begun_s
            if spent_s >= seconds:
                break
            on_progress(spent_s / seconds, f"{num_rows} rows of about {context} tokens")
            _run(core, runner, num_rows, context, rng)
    if not runner.records:
        raise ValueError("no step was measured: the time or the model's context is too short")
    shapes, taken = zip(*runner.records, strict=True)
    cost, errors = fit(shapes, taken)
    replica = Replica(
        name=Path(config.model).name,
        device=info.device,
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        max_model_len=info.max_model_len,
        cost=cost,
        scheduler=config.scheduler,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_states=memory.num_states,
        num_snapshots=memory.num_snapshots,
        tensor_parallel_size=config.tensor_parallel_size,
    )
    return Calibration(replica, errors, info.dtype, config.num_threads)


def _cases(most: int, capacity: int, max_model_len: int) -> Iterator[tuple[int, int]]:
    """Pairs (requests in flight, prompt length) that the KV cache has room for, shuffled."""
    for context in _CONTEXTS:
        if 2 * context + _MAX_OUTPUT > max_model_len:
            continue
        for num_rows in _NUM_ROWS:
            if num_rows <= most and num_rows * (2 * context + _MAX_OUTPUT) <= capacity:
                yield num_rows, context


def _run(
    core: EngineCore, runner: _RecordingRunner, num_rows: int, context: int, rng: random.Random
) -> None:
    """Run some steps with ``num_rows`` requests in flight, then abort the rest."""
    vocab = core.info.vocab_size
    live: set[str] = set()
    for _ in range(_STEPS):
        while len(live) < num_rows:
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(context // 2, 2 * context))]
            sampling = SamplingParams(
                temperature=0.0, max_tokens=rng.randint(4, _MAX_OUTPUT), ignore_eos=True
            )
            (request,) = fan_out(f"calibration-{rng.getrandbits(64)}", prompt, sampling)
            core.add(request)
            live.add(request.id)
        begun_s = time.perf_counter()
        output = core.step()
        taken_s = time.perf_counter() - begun_s
        runner.record_step(taken_s, max(map(len, output.token_ids), default=0))
        live -= {
            id_
            for id_, reason in zip(output.ids, output.finish_reasons, strict=True)
            if reason is not None
        }
    for id_ in live:
        core.abort(id_)
    while core.has_work:
        core.step()
    runner.discard_step()


class _RecordingRunner:
    """A runner that records the shape and time of each step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plan: StepPlan | None = None
        self.records: list[tuple[StepShape, float]] = []  # steps and their duration in seconds

    @property
    def info(self) -> EngineInfo:
        """The wrapped runner's info."""
        return self._runner.info

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step and remember its plan."""
        self._plan = plan if plan.rows else None
        return self._runner.launch(plan)

    def record_step(self, seconds: float, num_passes: int) -> None:
        """Record the last step, which took ``seconds`` and ``num_passes`` passes.

        A step with fewer passes than planned is not counted.
        """
        plan, self._plan = self._plan, None
        if plan is not None and (plan.num_passes == 1 or num_passes >= plan.num_passes):
            self.records.append((StepShape.of(plan.rows), seconds))

    def discard_step(self) -> None:
        """Do not count the last step."""
        self._plan = None

    def set_spans(self, spans: Spans) -> None:
        """See ``Runner.set_spans``."""
        self._runner.set_spans(spans)

    def load_adapter(self, adapter: Adapter) -> None:
        """See ``Runner.load_adapter``."""
        self._runner.load_adapter(adapter)

    def prepare(self) -> bool:
        """See ``Runner.prepare``."""
        return self._runner.prepare()

    def sleep(self, level: int) -> SleepingRunner:
        """See ``Runner.sleep``."""
        return self._runner.sleep(level)
