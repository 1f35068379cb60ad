"""The settings of the scheduler: how many run at once, in which order, in which steps."""

from __future__ import annotations

from engine.config import Policy
from server.setting import SettingsPart, setting
from server.setting_values import ScaledInt

SCHEDULING = "Scheduling and batching"


class SchedulingSettings(SettingsPart):
    """Who runs, and when; ``server/settings.py`` has them among its own."""

    max_num_seqs: int = setting(256, SCHEDULING, "Sequences that run at once in an engine.", ge=1)
    max_num_batched_tokens: ScaledInt | None = setting(
        None,
        SCHEDULING,
        "Tokens computed by one step, prompts and outputs together. When left out: 2048 on a GPU, "
        "on a CPU, where all who run wait longer for a step, 64 more than the sequences that run, "
        "and at least 256, with no more of prompts beside texts than is computed in 0.2 s.",
        ge=1,
    )
    scheduling_policy: Policy | None = setting(
        None,
        SCHEDULING,
        "Order of the queue: fcfs (first come first served), priority (lower values first), sjf "
        "(shortest job first), lpm (longest prefix match: whose prompt is cached furthest) or fair "
        "(by what each key's owner has been given, over its weight). "
        "When left out: fair with a key file, else fcfs.",
    )
    max_batch_requests: int = setting(
        32,
        SCHEDULING,
        "Requests of batches that run at once, in what capacity others leave; a quarter of them "
        "while others are served.",
        ge=1,
    )
    overlap: bool | None = setting(
        None,
        SCHEDULING,
        "Plan and launch each step while the one before it runs. When left out: on a GPU.",
    )
    max_step_passes: int | None = setting(
        None,
        SCHEDULING,
        "Tokens of a sequence that one step computes, one after the other, while nobody waits and "
        "all are soon done; one where 5 to 47 sequences run. When left out: 8 on a CPU, 1 "
        "elsewhere.",
        ge=1,
    )
    batching_window_ms: float = setting(
        0.0,
        SCHEDULING,
        "Milliseconds that new prompts may be held back to form a larger batch; 0 is off.",
        ge=0,
    )
    batching_window_prompts: int = setting(
        0, SCHEDULING, "Prompts that end the batching window early; 0 is no limit.", ge=0
    )
    batching_window_tokens: int = setting(
        0,
        SCHEDULING,
        "Prompt tokens that end the batching window early; 0 is max-num-batched-tokens.",
        ge=0,
    )
