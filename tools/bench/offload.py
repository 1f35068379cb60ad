"""What a host-memory tier saves when the KV cache is too small for its load.

    python -m loadtest.models 100m DIR
    python -m tools.bench.offload DIR

*preempted*: sequences that grow until some are preempted, in a cache for a quarter of them.
*displaced*: two long background sequences that are now and then displaced by a more urgent prompt,
in a cache for the two. *prefixes*: long prompts that evict each other from a cache for a quarter of
them, each requested again after all the others. Each case runs without a tier and with one that has
room for everything, in alternation. Reported are the tokens computed more than once, the seconds of
a round, and the median over the rounds of the speed with the tier relative to that without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import CacheConfig, Device, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.requests import fan_out
from engine.stats import EngineStats
from engine.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Load:
    """Random prompts without common prefixes, and their output lengths."""

    name: str
    lengths: Sequence[int]  # of prompts
    num_output: int  # tokens per request
    cached_share: float  # the share of all tokens that fits the cache
    num_waves: int = 1  # rounds of all prompts; each starts when the previous one is done
    max_num_seqs: int = 16  # sequences running at once
    urgent_lengths: Sequence[int] = ()  # prompt lengths of urgent requests that displace the others
    urgent_interval_steps: int = 24  # steps between two visitors

    @property
    def num_tokens(self) -> int:
        """The slots that a wave takes in all, without visitors."""
        return sum(self.lengths) + len(self.lengths) * self.num_output

    def run(self, core: EngineCore, seed: int) -> tuple[float, dict[str, int]]:
        """Run the load; returns the seconds taken and the engine's counts."""
        rng = random.Random(seed)
        top = core.info.vocab_size - 1
        prompts, visits = (
            [[rng.randint(3, top) for _ in range(length)] for length in lengths]
            for lengths in (self.lengths, self.urgent_lengths)
        )
        before, begun_s = core.stats, time.perf_counter()
        num_computed = num_steps = 0
        for wave in range(self.num_waves):
            for index, prompt in enumerate(prompts):
                self._submit(core, f"{seed}-{wave}-{index}", prompt)
            while core.has_work:
                num_computed += core.step().stats.step_tokens
                num_steps += 1
                if visits and not num_steps % self.urgent_interval_steps:
                    self._submit(core, f"{seed}-visit-{len(visits)}", visits.pop(), urgent=True)
        taken_s = time.perf_counter() - begun_s
        return taken_s, {"computed": num_computed, **_counter_deltas(before, core.stats)}

    def _submit(
        self, core: EngineCore, name: str, prompt: list[int], *, urgent: bool = False
    ) -> None:
        num_output = 1 if urgent else self.num_output
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_output)
        background = bool(self.urgent_lengths) and not urgent
        core.add(fan_out(name, prompt, sampling, background=background)[0])


def cases(*, is_tiny: bool) -> list[Load]:
    """The loads; tiny ones for a test run."""
    if is_tiny:
        return [
            Load(name="preempted", lengths=[12] * 6, num_output=40, cached_share=0.3),
            Load(
                name="displaced",
                lengths=[60] * 2,
                num_output=20,
                cached_share=1.0,
                urgent_lengths=[140] * 2,
                urgent_interval_steps=5,
            ),
            Load(name="prefixes", lengths=[60] * 4, num_output=1, cached_share=0.3, num_waves=2),
        ]
    return [
        Load(name="preempted", lengths=[448] * 6, num_output=160, cached_share=0.25),
        Load(
            name="displaced",
            lengths=[1024] * 2,
            num_output=96,
            cached_share=1.05,
            urgent_lengths=[1024] * 5,
        ),
        Load(name="prefixes", lengths=[1024] * 8, num_output=4, cached_share=0.25, num_waves=3),
    ]


def measure(model: str, load: Load, rounds: int, device: Device) -> dict[str, Any]:
    """Measure rounds without and with a tier; the order alternates from round to round."""
    engines = {has_tier: _engine(model, load, device, has_tier=has_tier) for has_tier in (0, 1)}
    taken: dict[int, list[float]] = {0: [], 1: []}
    results: dict[int, dict[str, int]] = {}
    for number in range(rounds + 1):
        for has_tier in (0, 1) if number % 2 else (1, 0):
            seconds, results[has_tier] = load.run(engines[has_tier], number)
            if number:  # the first round touches new memory
                taken[has_tier].append(seconds)
    ratios = [without / with_ for without, with_ in zip(taken[0], taken[1], strict=True)]
    memory = engines[1].info.memory
    return {
        "case": load.name,
        "tokens_of_demand": load.num_tokens,
        "tokens_of_cache": memory.num_blocks * memory.block_size,
        "recompute": {"seconds": statistics.median(taken[0]), **results[0]},
        "tier": {"seconds": statistics.median(taken[1]), **results[1]},
        "speed": statistics.median(ratios),
        "rounds": ratios,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory in Hugging Face format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="the case of this name")
    parser.add_argument("--tiny", action="store_true", help="loads that take a moment")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(argv)
    for load in cases(is_tiny=options.tiny):
        if options.only in (None, load.name):
            result = measure(options.model, load, options.rounds, options.device)
            print(json.dumps(result), flush=True)
    return 0


def _engine(model: str, load: Load, device: Device, *, has_tier: int) -> EngineCore:
    block_size = 16 if device == "cpu" else 64
    longest = max(*load.lengths, *load.urgent_lengths) + load.num_output
    num_blocks = max(int(load.num_tokens * load.cached_share), longest) // block_size + 1
    return EngineCore.load(
        EngineConfig(
            model=model,
            device=device,
            max_model_len=longest + 1,
            scheduler=SchedulerConfig(max_num_seqs=load.max_num_seqs, max_step_passes=1),
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=num_blocks,
                # Enough for a few hundred million parameters; memory is only taken once written to.
                offload_bytes=has_tier * 2**31,
            ),
        )
    )


def _counter_deltas(before: EngineStats, after: EngineStats) -> dict[str, int]:
    return {
        "preemptions": after.num_preemptions - before.num_preemptions,
        "recomputed": after.num_recomputed - before.num_recomputed,
        "prompt_tokens_found": after.prefix_cache_hits - before.prefix_cache_hits,
        "blocks_offloaded": after.tier.num_offloaded - before.tier.num_offloaded,
        "blocks_loaded": after.tier.num_loaded - before.tier.num_loaded,
    }


if __name__ == "__main__":
    sys.exit(main())
