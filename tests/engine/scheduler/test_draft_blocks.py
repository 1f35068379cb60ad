"""What drafts leave behind: blocks that are found again, and blocks that are given back in time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.config import SchedulerConfig, SpeculationConfig
from engine.kv_cache.pool import BlockPool
from engine.scheduler import Scheduler
from engine.speculation.speculator import Speculator
from engine.types import Request, SamplingParams, StepResult

TOKEN = 7  # the only one that is sampled


class Drafts:
    """Drafts three times ``token``, once the text has one of these lengths."""

    def __init__(self, token: int, lengths: range) -> None:
        self.token, self.lengths = token, lengths

    def begin(self, request: Request) -> Drafts:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        return (self.token,) * min(3, most) if len(token_ids) in self.lengths else ()

    def lookup_cost_s(self, num_unseen: int) -> float:
        return 0.0

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        pass


def serve(
    drafts: Drafts, num_prompt: int, max_tokens: int, window: int | None = None
) -> tuple[Scheduler, int]:
    """Serve one request; returns the scheduler, and the most blocks that were held at once."""
    pool = BlockPool(64, 4)
    config = SpeculationConfig(method="ngram", num_draft_tokens=3, adaptive=False)
    speculator = Speculator(config, drafts)
    scheduler = Scheduler(
        SchedulerConfig(), pool, max_model_len=200, window=window, speculator=speculator
    )
    sampling = SamplingParams(max_tokens=max_tokens)
    scheduler.add(Request(id="a", prompt_token_ids=(1,) * num_prompt, sampling=sampling))
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        accepts = drafts.token == TOKEN
        rows = [row for row in plan.rows if row.is_sampled]
        tokens = tuple((TOKEN,) * (1 + row.num_drafts * accepts) for row in rows)
        scheduler.update(plan, StepResult(tuple(row.id for row in rows), tokens))
        most = max(most, pool.stats().held)
        assert pool.check(scheduler.tables) == []
    assert speculator.stats.num_draft_tokens
    return scheduler, most


@pytest.mark.parametrize("length", range(3, 9))
def test_a_text_is_found_again_though_refused_drafts_have_taken_blocks(length: int) -> None:
    # Drafts reach into the next block, in which the text itself arrives only steps later.
    scheduler, _ = serve(Drafts(TOKEN + 1, range(length, length + 1)), 2, 12)
    longer = Request(id="b", prompt_token_ids=(1, 1, *(TOKEN,) * 12))
    assert scheduler.num_cached_tokens(longer) == 12


@pytest.mark.parametrize("num_prompt", range(2, 6))
def test_what_no_window_sees_is_given_back_also_if_no_step_ends_at_a_block(num_prompt: int) -> None:
    _, most = serve(Drafts(TOKEN, range(200)), num_prompt, 150, window=8)
    assert most <= 4  # the window, and the drafts
