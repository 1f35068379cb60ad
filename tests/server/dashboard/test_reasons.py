"""Why a request was slow: the cause with the largest share of its time, with its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from engine.snapshot import Phase, RequestRecord
from server.dashboard.reasons import why_slow
from server.dashboard.state import short_id

NOW_S = 110.0


def life(*phases: tuple[str, float], ended_s: float | None = None, **fields: Any) -> RequestRecord:
    """A request whose phases begin at these offsets from its arrival at 100."""
    values = {
        "id": "x",
        "tenant": "",
        "background": False,
        "num_prompt": 2000,
        "num_cached": 0,
        "num_output": 100,
        "max_output": 200,
        "num_blocks": 3,
        "finish_reason": None,
        "error": "",
        "num_preemptions": 0,
        "num_steps": 100,
        "num_prompt_steps": 1,
        "mean_rows": 1.0,
        "num_mixed_steps": 0,
        **fields,
    }
    return RequestRecord(
        phases=tuple(Phase(kind, 100.0 + after_s) for kind, after_s in phases),
        ended_s=ended_s,
        **values,
    )


LATE = (("queued", 0), ("prefill", 0.1), ("decode", 0.2))


@pytest.mark.parametrize(
    ("of", "line"),
    [
        (life(("queued", 0)), "waited 10.0 s in the queue"),
        (life(("queued", 0), ("prefill", 6), ("decode", 7)), "waited 6.0 s in the queue"),
        (
            life(("images", 0), ("grammar", 6), ("queued", 8), ("prefill", 8.1)),
            "reading its images took 6.0 s",
        ),
        (
            life(("grammar", 0), ("queued", 8), ("prefill", 8.1)),
            "compiling its grammar took 8.0 s",
        ),
        (
            life(
                ("queued", 0), ("prefill", 0.5), ("decode", 8), num_cached=512, num_prompt_steps=8
            ),
            "a prompt of 2,000 tokens (512 cached) took 7.5 s, in 8 steps",
        ),
        (
            life(*LATE, ("preempted", 1), ("prefill", 6), ("decode", 8), num_preemptions=2),
            "preempted 2 times: 7.0 s to wait and recompute",
        ),
        (life(*LATE), "a long answer: 100 tokens, 98 ms per token"),
        (life(*LATE, mean_rows=32.0), "shared its steps with 31 other requests: 98 ms per token"),
        (
            life(*LATE, mean_rows=32.0, num_mixed_steps=40),
            "40% of its steps also computed other prompts: 98 ms per token",
        ),
    ],
)
def test_the_longest_part_is_named(of: RequestRecord, line: str) -> None:
    assert why_slow(of, NOW_S) == line


def test_a_quick_one_needs_no_reason() -> None:
    quick = life(("queued", 0), ("prefill", 0.01), ("decode", 0.05), ended_s=100.2)
    assert why_slow(quick, NOW_S) == ""
    late = "slow client: finished 9.8 s before it was read"
    assert why_slow(quick, NOW_S, unread_s=9.8) == late


def test_no_id_is_told_whole() -> None:
    whole = "resp_" + "0123456789abcdef" * 2
    assert short_id(whole) == "89abcdef"
    assert short_id(f"{whole}/2") == "89abcdef/2"
    assert short_id("mine") == "…"
