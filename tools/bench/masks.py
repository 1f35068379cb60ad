"""What grammar-constrained decoding costs a decode step.

    python -m loadtest.models 100m DIR
    python -m tools.bench.masks DIR

The same sequences are continued with and without a grammar, in alternation, at temperature 1 so
that texts diverge and their masks differ. Reported are the median step times, their ratio by round,
and the CPU time the masks take on the engine thread: advancing the matchers and filling the mask
rows. The mask share is the mean of that time over the median time of steps without a grammar; the
median over the rounds counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import Failure
from engine.grammar.llguidance_backend import LlguidanceMatcher
from engine.requests import fan_out
from engine.runner import load_runner
from engine.runner.inputs import HostBatch
from engine.runner.sampling import Sampler, StepMasks
from engine.sampling.masks import MaskedRow, MaskLines
from engine.types import Grammar, SamplingParams

_ROWS = (1, 16, 64)
_PROMPT, _WARM_UP_STEPS, _ROUNDS = 64, 8, 3
_GATE = 0.05  # maximum share of a step
# Length-limited strings cost the most: near the limit, fewer tokens fit.
_NAMES = {"strings": {"type": "string"}, "bounded": {"type": "string", "maxLength": 30}}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each number of rows, then one of JSON. Returns 1 if a gate is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory in Hugging Face format, with a tokenizer")
    parser.add_argument("--steps", type=int, default=40, help="timed, of each round")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(argv)
    length = _PROMPT + _WARM_UP_STEPS + options.steps + 8
    config = EngineConfig(
        model=options.model,
        device=options.device,
        max_model_len=length,
        scheduler=SchedulerConfig(max_num_seqs=max(_ROWS), max_step_passes=1),
        cache=CacheConfig(
            enable_prefix_caching=False, num_blocks=max(_ROWS) * -(-length // 16) + max(_ROWS)
        ),
    )
    core = EngineCore(config, load_runner(config))
    clock = _MaskClock()
    results = [
        measure(core, schema, rows, options.steps, clock) for schema in _NAMES for rows in _ROWS
    ]
    for told in results:
        print(
            f"{told['schema']:8} {told['rows']:3} rows: {told['step_ms']:.2f} ms a step, "
            f"{told['masked_step_ms']:.2f} ms with masks; the masks "
            f"{told['mask_us_a_token']:.1f} us a token, {told['mask_share']:.2%} of the step; "
            f"{told['waiting_share']:.1%} of them waited, {told['in_vain_share']:.1%} in vain"
        )
    model = Path(options.model).name
    print(json.dumps({"model": model, "vocab_size": core.info.vocab_size, "masks": results}))
    return 1 if max(told["mask_share"] for told in results) >= _GATE else 0


def measure(
    core: EngineCore, schema: str, rows: int, steps: int, clock: _MaskClock
) -> dict[str, Any]:
    """Measure rounds without and with a grammar, in alternation."""
    grammar = Grammar("json_schema", json.dumps(_schema(_NAMES[schema])))
    core.compile(grammar)
    rounds: dict[bool, list[list[float]]] = {False: [], True: []}  # seconds of steps
    masks: list[list[float]] = []
    clock.num_deferred = clock.num_wasted = num_masks = 0
    for number in range(2 * _ROUNDS):
        is_held = number % 4 in (1, 2)  # the order alternates from round to round
        _start(core, f"{rows}-{number}", rows, grammar if is_held else None)
        taken: list[float] = []
        masks_s: list[float] = []
        for step in range(_WARM_UP_STEPS + steps):
            clock.spent_s = 0.0
            begun_s = time.perf_counter()
            core.step()
            if step >= _WARM_UP_STEPS:
                taken.append(time.perf_counter() - begun_s)
                masks_s.append(clock.spent_s)
        rounds[is_held].append(taken)
        if is_held:
            masks.append(masks_s)
            num_masks += rows * (_WARM_UP_STEPS + steps)
        for index in range(rows):
            core.abort(f"{rows}-{number}-{index}")
        while core.has_work:
            core.step()
    plain_s, held_s = (statistics.median(itertools.chain(*rounds[held])) for held in (False, True))
    medians = {held: [statistics.median(taken) for taken in rounds[held]] for held in rounds}
    return {
        "schema": schema,
        "rows": rows,
        "step_ms": plain_s * 1e3,
        "masked_step_ms": held_s * 1e3,
        "mask_us_a_token": statistics.fmean(itertools.chain(*masks)) / rows * 1e6,
        "mask_share": statistics.median(
            statistics.fmean(mask_s) / plain
            for mask_s, plain in zip(masks, medians[False], strict=True)
        ),
        "step_ratios": [
            held / plain for plain, held in zip(medians[False], medians[True], strict=True)
        ],
        "waiting_share": clock.num_deferred / num_masks,
        "in_vain_share": clock.num_wasted / num_masks,
        "worst_mask_ms": max(itertools.chain(*masks)) * 1e3,
    }


def _schema(name: dict[str, Any]) -> dict[str, Any]:
    """A schema that is never complete: an array whose ``minItems`` exceeds the number of tokens."""
    person = {
        "type": "object",
        "properties": {
            "name": name,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "height": {"type": "number"},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "vip"]}},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 10_000, "items": person}


def _start(core: EngineCore, name: str, rows: int, grammar: Grammar | None) -> None:
    """Queue the sequences and step until each of them has a token."""
    for index in range(rows):
        sampling = SamplingParams(seed=index, ignore_eos=True, grammar=grammar)
        prompt = [3 + (index * 131 + place * 7) % 1000 for place in range(_PROMPT)]
        (request,) = fan_out(f"{name}-{index}", prompt, sampling)
        core.add(request)
    waiting = rows
    while waiting:
        waiting -= len(core.step().num_cached_tokens)  # reported with the first token


class _MaskClock:
    """Measures the CPU time that masks take in a step, and how many of them were deferred.

    When the mask of a row is deferred, finding the tokens that the row would choose replaces its
    draw and is not counted.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.num_deferred = self.num_wasted = 0
        masks, settle, waited = (
            Sampler.masks,
            MaskLines.write_deferred,
            LlguidanceMatcher.record_deferral,
        )

        def timed_masks(sampler: Sampler, batch: HostBatch) -> StepMasks:
            with self._counted():
                return masks(sampler, batch)

        def timed_settle(
            lines: MaskLines, rows: Sequence[MaskedRow], candidates: Sequence[Sequence[int]]
        ) -> dict[int, Failure]:
            self.num_deferred += len(rows)
            with self._counted():
                return settle(lines, rows, candidates)

        def counted_waited(matcher: LlguidanceMatcher, *, wasted: bool) -> None:
            self.num_wasted += wasted
            waited(matcher, wasted=wasted)

        # ``setattr``, since the first parameters' types differ from ``self``.
        setattr(Sampler, "masks", timed_masks)  # noqa: B010
        setattr(MaskLines, "write_deferred", timed_settle)  # noqa: B010
        setattr(LlguidanceMatcher, "record_deferral", counted_waited)  # noqa: B010

    @contextmanager
    def _counted(self) -> Iterator[None]:
        begun_s = time.thread_time()
        try:
            yield
        finally:
            self.spent_s += time.thread_time() - begun_s


if __name__ == "__main__":
    sys.exit(main())
