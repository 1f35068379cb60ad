"""A snapshot of an engine for inspection: its last steps, its requests and its blocks.

Made by ``engine.monitor``, and crosses the process boundary. Times are from ``time.monotonic()``,
comparable across the processes of one machine. It contains no text and no tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.stats import EngineStats
from engine.types import FinishReason

# Values of ``BlockMap.owners`` that do not name a request.
FREE = 0
CACHED = 1
HELD = 2  # and above: held by the request at index ``value - HELD``

PhaseKind = Literal["images", "audio", "grammar", "queued", "prefill", "decode", "preempted"]


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step computed, and how long it took."""

    ended_s: float
    duration_s: float  # since its launch, or since the previous step ended if that was later
    num_decodes: int  # decode rows
    num_prompts: int  # rows that compute a part of a prompt, or recompute it after preemption
    num_prompt_tokens: int  # tokens in those rows
    num_drafts: int  # drafts verified
    num_accepted: int  # of these, accepted
    num_passes: int
    num_preempted: int  # sequences preempted for it
    num_output_tokens: int  # tokens that it produced


class SecondRecord(msgspec.Struct, array_like=True, gc=False):
    """Totals of the steps that ended within one second. Written by ``EngineMonitor``."""

    second: int  # of the monotonic clock
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_running: int = 0  # after the last of the steps
    num_waiting: int = 0


class Phase(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A phase of a request's life; it lasts until the next one begins or the request ends."""

    kind: PhaseKind
    began_s: float


class RequestRecord(msgspec.Struct, frozen=True, array_like=True):
    """One request, from its arrival until now or until its end."""

    id: str
    tenant: str
    background: bool
    num_prompt: int  # tokens
    num_cached: int  # of those, found in the prefix cache
    num_output: int  # tokens so far
    max_output: int  # tokens; 0 if the request is for a vector
    num_blocks: int  # held now
    phases: tuple[Phase, ...]  # the first begins at its arrival
    ended_s: float | None
    finish_reason: FinishReason | None
    error: str  # the kind of failure that ended it; empty if none
    num_preemptions: int
    # Over the recorded steps in which it had a row:
    num_steps: int
    num_prompt_steps: int  # of these, steps with a part of its own prompt
    mean_rows: float  # mean number of rows in those steps, including its own
    num_mixed_steps: int  # steps in which it decoded beside a part of another's prompt


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of the KV cache in order of their ids, ``per_cell`` to a cell.

    A cell of several blocks shows a held one before a cached one, and a cached one before a free
    one.
    """

    per_cell: int
    owners: tuple[int, ...]  # FREE, CACHED, or HELD + index among Snapshot.lives
    num_held: tuple[int, ...]  # held blocks in the cell
    references: tuple[int, ...]  # largest reference count in the cell


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state of an engine between two steps."""

    now_s: float
    since_s: float  # when recording began
    stats: EngineStats
    steps: tuple[StepRecord, ...]  # the most recent, newest last
    seconds: tuple[SecondRecord, ...]  # the most recent in which a step ended, newest last
    # Running, then the first waiting, then the most recently ended.
    requests: tuple[RequestRecord, ...]
    blocks: BlockMap
