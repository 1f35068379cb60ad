"""What the engine's own bookkeeping costs per step: scheduler and input building, without a model.

    python -m tools.bench.bookkeeping

Decode steps of 64 to 1,024 running sequences, and of 256 with 10,000 more in the queue. Choosing
tokens is free. The plan, the batch's arrays and the processing of results are timed, in CPU time,
which a busy machine does not inflate.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from engine.config import SchedulerConfig
from engine.gc_tuning import tune_for_serving
from engine.kv_cache.pool import BlockPool
from engine.requests import fan_out
from engine.runner.inputs import extend_tables, host_batch, send
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from engine.scheduler import Scheduler
from engine.types import SamplingParams, StepPlan, StepResult

_PROMPT, _BLOCK_SIZE, _VOCABULARY = 64, 16, 32_000
_CASES = ((64, 0), (256, 0), (512, 0), (1024, 0), (256, 10_000))  # running, queued
_GATES_MS = {(256, 0): 0.3, (1024, 0): 1.2, (256, 10_000): 0.3}
_WARM_UP_STEPS = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each case, then one of JSON. Returns 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="timed, of each case")
    options = parser.parse_args(argv)
    results = []
    for running, queued in _CASES:
        result = measure(running, queued, options.steps)
        results.append(result)
        gate = _GATES_MS.get((running, queued))
        print(
            f"{running:5} running, {queued:6,} queued: {result['step_ms']:.3f} ms a step "
            f"(schedule {result['schedule_ms']:.3f}, inputs {result['inputs_ms']:.3f}, "
            f"update {result['update_ms']:.3f})" + (f"; gate {gate:g}" if gate else "")
        )
    print(json.dumps({"bookkeeping": results}))
    return 0


def measure(running: int, queued: int, steps: int) -> dict[str, Any]:
    """The medians over ``steps`` decode steps of ``running`` sequences."""
    length = _PROMPT + _WARM_UP_STEPS + steps + 8
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=running * _PROMPT)
    pool = BlockPool(running * -(-length // _BLOCK_SIZE), _BLOCK_SIZE)
    scheduler = Scheduler(config, pool, max_model_len=length)
    table = RowTable(running, -(-length // _BLOCK_SIZE), _VOCABULARY, (0,), torch.device("cpu"))
    uploads = Uploads(torch.device("cpu"))
    sampling = SamplingParams(temperature=0, max_tokens=length - _PROMPT, ignore_eos=True)
    for number in range(running + queued):
        prompt = [(number * 31 + place) % _VOCABULARY for place in range(_PROMPT)]
        (request,) = fan_out(f"cmpl-{number:032x}", prompt, sampling)
        scheduler.add(request)
    gc.collect()
    thresholds = gc.get_threshold()
    tune_for_serving()  # as the engine does after loading
    taken: list[tuple[float, float, float]] = []
    for step in range(1 + _WARM_UP_STEPS + steps):
        begun_s = time.thread_time()
        plan = scheduler.schedule(True, 0.0)
        planned_s = time.thread_time()
        _build(plan, table, uploads)
        built_s = time.thread_time()
        result = _chosen(plan)
        chosen_s = time.thread_time()
        scheduler.update(plan, result, 0.0)
        if step > _WARM_UP_STEPS:
            taken.append((planned_s - begun_s, built_s - planned_s, time.thread_time() - chosen_s))
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    schedule, inputs, update = (statistics.median(part) * 1e3 for part in zip(*taken, strict=True))
    return {
        "running": running,
        "queued": queued,
        "step_ms": statistics.median(map(sum, taken)) * 1e3,
        "schedule_ms": schedule,
        "inputs_ms": inputs,
        "update_ms": update,
    }


def _build(plan: StepPlan, table: RowTable, uploads: Uploads) -> None:
    """The host's share of a step, as in ``engine/runner/model_runner.py``."""
    for row_id in plan.removed:
        table.remove(row_id)
    for added in plan.added:
        table.add(added)
    extend_tables(plan.rows, table)
    send(host_batch(plan.rows, table), plan.copies, table, uploads)


def _chosen(plan: StepPlan) -> StepResult:
    ids = tuple(plan.rows.ids)
    return StepResult(ids, ((7,),) * len(ids), (None,) * len(ids))


if __name__ == "__main__":
    sys.exit(main())
