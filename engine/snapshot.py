"""What an engine tells of itself when somebody looks: its last steps, its requests, its blocks.

Crosses the boundary. Made by ``engine.watch``; times are of ``time.monotonic()``, comparable across
the processes of one machine. No text and no token is in it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.types import EngineStats, FinishReason

# Values of ``BlockMap.owners`` below those that name a request.
FREE = 0
CACHED = 1
HELD = 2  # and on: by the request at this place, counted from here

PhaseKind = Literal["images", "grammar", "queued", "prefill", "decode", "preempted"]


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step computed, and how long it took."""

    ended_s: float
    duration_s: float  # since its launch, or since the end of the step before it if that was later
    num_decodes: int  # rows that continue an answer
    num_prompts: int  # rows that compute a part of a prompt, again where it was preempted
    num_prompt_tokens: int  # of those
    num_drafts: int  # guesses that it verified
    num_accepted: int  # of those, kept
    num_passes: int
    num_preempted: int  # sequences that had to give up their blocks for it
    num_told: int  # tokens that it brought


class SecondRecord(msgspec.Struct, array_like=True, gc=False):
    """What the steps that ended within one second did. Written by the watch."""

    second: int  # of the monotonic clock
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_told: int = 0
    num_running: int = 0  # after the last of them
    num_waiting: int = 0


class Phase(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a request's life, until the next one begins or the request ends."""

    kind: PhaseKind
    began_s: float


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One request, from its arrival until now or its end."""

    id: str
    tenant: str
    background: bool
    num_prompt: int  # tokens
    num_cached: int  # of those, found in the prefix cache
    num_output: int  # tokens so far
    max_output: int  # tokens; 0 where a vector is asked for
    num_blocks: int  # held now
    phases: tuple[Phase, ...]  # the first begins at its arrival
    ended_s: float | None
    finish_reason: FinishReason | None
    error: str  # what kind of failure ended it; empty without one
    num_preemptions: int
    # Over the steps that were watched and had a row of it:
    num_steps: int
    num_prompt_steps: int  # of those, with a part of its own prompt
    mean_rows: float  # of those steps, its own included
    num_crossed: int  # of the steps in which it decoded, with a part of somebody's prompt


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of the KV cache in the order of their numbers, ``per_cell`` to a cell.

    Where several blocks are one cell, it tells of a held one before a cached and a free one.
    """

    per_cell: int
    owners: tuple[int, ...]  # FREE, CACHED, or HELD + index among Snapshot.lives
    num_held: tuple[int, ...]  # blocks of the cell that are held
    references: tuple[int, ...]  # the most that a block of the cell has


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """An engine, as it stood between two steps."""

    now_s: float
    since_s: float  # from when steps were watched
    stats: EngineStats
    steps: tuple[StepRecord, ...]  # the last ones, the newest last
    seconds: tuple[SecondRecord, ...]  # the last ones in which a step ended, the newest last
    lives: tuple[Life, ...]  # who runs, then the first of those who wait, then who ended last
    blocks: BlockMap
