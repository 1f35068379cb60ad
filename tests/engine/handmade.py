"""Drives a runner with handmade plans: one call, one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import CacheConfig, CacheDtype, Device, EngineConfig, SchedulerConfig
from engine.plan_rows import PlanRows, ScheduledRow
from engine.runner import load_runner
from engine.runner.model_runner import ModelRunner
from engine.types import (
    PENDING_TOKEN,
    AddedRow,
    Request,
    SamplingParams,
    StepPlan,
    StepResult,
)

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


def load(
    directory: Path,
    num_blocks: int = 256,
    device: Device = "cpu",
    cache_dtype: CacheDtype = "auto",
    **changes: Any,
) -> ModelRunner:
    """A runner on one CPU thread with small blocks, in float32 unless stated otherwise."""
    changes.setdefault("dtype", "float32")
    return load_runner(
        EngineConfig(
            model=str(directory),
            device=device,
            num_threads=1,
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, dtype=cache_dtype),
            scheduler=SchedulerConfig(max_num_seqs=12),
            **changes,
        )
    )


def request(row_id: str, prompt, sampling: SamplingParams = GREEDY) -> Request:
    return Request(id=row_id, prompt_token_ids=tuple(prompt), sampling=sampling)


class Hand:
    """Allocates blocks, tracks the position of each row, and builds the plans."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self._added: list[AddedRow] = []
        self._shared: dict[str, tuple[int, ...]] = {}
        self._free = list(range(runner.info.memory.num_blocks - 1, -1, -1))

    def add(self, request: Request, output=(), shared_blocks=()) -> None:
        """Add a row to the next step; ``shared_blocks`` already hold its first tokens."""
        row_id = request.id
        self.tokens[row_id] = [*request.prompt_token_ids, *output]
        self.computed[row_id] = len(shared_blocks) * BLOCK_SIZE
        self.blocks[row_id] = []
        self._added.append(AddedRow(request, tuple(output)))
        self._shared[row_id] = tuple(shared_blocks)

    def step(
        self, counts: dict[str, int], removed=(), copies=(), *, pending: bool = False
    ) -> StepResult:
        """Compute the given number of tokens of each row, in this order, and append sampled tokens.

        With ``pending`` the last token of each row is one that only the runner knows.
        """
        rows = PlanRows.of(self._row(row_id, count, pending) for row_id, count in counts.items())
        added, self._added = tuple(self._added), []
        result = self.runner.launch(StepPlan(rows, added, tuple(removed), tuple(copies))).result()
        for row_id, tokens in zip(result.ids, result.token_ids, strict=True):
            self.tokens[row_id].extend(tokens)
        return result

    def decode(self, row_id: str, count: int) -> list[int]:
        """Compute the rest of a row alone until it has ``count`` new tokens in all."""
        begin = len(self.tokens[row_id])
        while len(self.tokens[row_id]) < begin + count:
            self.step({row_id: len(self.tokens[row_id]) - self.computed[row_id]})
        return self.tokens[row_id][begin:]

    def _row(self, row_id: str, count: int, pending: bool) -> ScheduledRow:
        start = self.computed[row_id]
        end = start + count
        held = self.blocks[row_id]
        new = list(self._shared.pop(row_id, ()))
        while (len(held) + len(new)) * BLOCK_SIZE < end:
            new.append(self._free.pop())
        held.extend(new)
        self.computed[row_id] = end
        tokens = self.tokens[row_id]
        told = [*tokens[start : end - 1], PENDING_TOKEN] if pending else tokens[start:end]
        return ScheduledRow(row_id, start, tuple(told), tuple(new), end == len(tokens))
