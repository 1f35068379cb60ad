"""The part of ``server/settings.py`` for the scheduler."""

from __future__ import annotations

from engine.config import Policy
from server.setting import SettingsPart, setting
from server.setting_values import ScaledInt

SCHEDULING = "Scheduling and batching"


class SchedulingSettings(SettingsPart):
    """How many sequences run at once, in which order and in which steps."""

    max_num_seqs: int = setting(
        256, SCHEDULING, "Most sequences that run at once in an engine.", ge=1
    )
    max_num_batched_tokens: ScaledInt | None = setting(
        None,
        SCHEDULING,
        "Most tokens computed per step, prompts and outputs together. Default: 8192 on a GPU of "
        "64 GiB and more, otherwise 2048; on a CPU 64 more than the running sequences, at least "
        "256. With the default, prompts are also limited to what takes 0.1 s, on a CPU 0.2 s, "
        "while outputs are being produced; a value given here turns that off.",
        ge=1,
    )
    scheduling_policy: Policy | None = setting(
        None,
        SCHEDULING,
        "Order of the queue: fcfs (first come, first served), priority (lower values first), sjf "
        "(shortest job first), lpm (longest prefix match: most of the prompt cached) or fair "
        "(least service so far for its weight, per key). Default: fair with a key file, else "
        "fcfs.",
    )
    max_batch_requests: int = setting(
        32,
        SCHEDULING,
        "Most requests of batches that run at once, in capacity that others leave free; a "
        "quarter of that while others are being served.",
        ge=1,
    )
    overlap: bool | None = setting(
        None,
        SCHEDULING,
        "Plan and launch each step while the previous one runs. Default: on for a GPU.",
    )
    max_step_passes: int | None = setting(
        None,
        SCHEDULING,
        "Most tokens per sequence that one step computes in succession, if no request waits and "
        "the step stays short. Default: 8 on a CPU, 1 on a GPU.",
        ge=1,
    )
    batching_window_ms: float = setting(
        0.0,
        SCHEDULING,
        "Milliseconds that new prompts may be held back to form a larger batch. 0 is off.",
        ge=0,
    )
    batching_window_prompts: int = setting(
        0, SCHEDULING, "Prompts that end the batching window early. 0 is no limit.", ge=0
    )
    batching_window_tokens: int = setting(
        0,
        SCHEDULING,
        "Prompt tokens that end the batching window early. 0 means --max-num-batched-tokens.",
        ge=0,
    )
