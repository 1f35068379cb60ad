"""The page's data: the engine's snapshot as JSON, with nothing that opens stored data.

Ids are cut to their ends, because without keys the id of a stored response suffices to read it. A
snapshot has no text, no tokens and no salts.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from engine.snapshot import PhaseKind, RequestRecord, SecondRecord, Snapshot, StepRecord
from engine.types import EngineInfo, FinishReason
from server.dashboard.reasons import phase_durations, why_slow

Status = Literal[
    "loading", "serving", "busy", "asleep", "reloading", "restarting", "draining", "gone"
]
RequestStatus = PhaseKind | Literal["done", "aborted", "failed"]

_ID_LENGTH = 8  # of the end of an id


class DashboardStep(Struct, array_like=True):
    """One step, as a list."""

    ago_ms: float  # since its end
    duration_ms: float
    num_decodes: int
    num_prompts: int
    num_prompt_tokens: int
    num_drafts: int
    num_accepted: int
    num_passes: int
    num_preempted: int
    num_output_tokens: int


class DashboardSecond(Struct, array_like=True):
    """One second, as a list."""

    ago_s: int  # whole seconds; 0 is not over yet
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_running: int
    num_waiting: int


class DashboardPhase(Struct, array_like=True):
    """A part of a request's life, as a list."""

    kind: PhaseKind
    ms: float


class DashboardRequest(Struct):
    """A request that is live, or ended recently."""

    id: str  # the end of the id
    tenant: str
    background: bool
    status: RequestStatus
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_output_tokens: int
    blocks: int
    preemptions: int
    phases: list[DashboardPhase]
    total_ms: float
    ended_ago_ms: float | None
    finish_reason: FinishReason | None
    error: str
    why: str  # why it was slow; empty if it was not


class DashboardBlocks(Struct):
    """The KV cache, and a map of it in cells of ``per_cell`` blocks.

    An owner is 0 (free), 1 (free, with a cached prefix) or 2 plus the index of a request in
    ``requests``.
    """

    total: int
    held: int
    shared: int
    cached: int
    free: int
    block_size: int
    wasted_slots: int
    per_cell: int
    owners: tuple[int, ...]
    num_held: tuple[int, ...]
    references: tuple[int, ...]


class DashboardTotals(Struct):
    """Totals of the engine process; counters begin at 0 with it."""

    running: int
    waiting: int
    max_running: int
    steps: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int
    draft_tokens: int
    accepted_tokens: int
    restarts: int  # of the engine


class DashboardModel(Struct):
    """The served model."""

    name: str
    architecture: str
    num_parameters: int
    dtype: str
    device: str
    max_model_len: int


class DashboardState(Struct):
    """The response of /dashboard/state. The snapshot's fields are missing if there is none."""

    status: Status
    version: str
    engines: int | UnsetType = UNSET  # number of engines, if there are several
    model: DashboardModel | UnsetType = UNSET
    watched_s: float | UnsetType = UNSET  # how long steps have been recorded
    totals: DashboardTotals | UnsetType = UNSET
    blocks: DashboardBlocks | UnsetType = UNSET
    steps: list[DashboardStep] | UnsetType = UNSET  # newest last
    seconds: list[DashboardSecond] | UnsetType = UNSET
    requests: list[DashboardRequest] | UnsetType = UNSET  # running, waiting, ended


def describe_model(name: str, info: EngineInfo) -> DashboardModel:
    """The description of the model served under ``name``."""
    return DashboardModel(
        name=name,
        architecture=info.architecture,
        num_parameters=info.num_parameters,
        dtype=info.dtype,
        device=info.device,
        max_model_len=info.max_model_len,
    )


def add_snapshot(
    state: DashboardState,
    snapshot: Snapshot,
    unread_s: dict[str, float],
    *,
    max_running: int,
    restarts: int,
) -> None:
    """Add ``snapshot`` to ``state``.

    Args:
        state: its other fields are set.
        snapshot: of the engine.
        unread_s: by id, how long complete answers have waited, or waited, to be read.
        max_running: sequences that may run at once.
        restarts: of the engine.
    """
    now_s, stats = snapshot.now_s, snapshot.stats
    blocks, cells = stats.blocks, snapshot.blocks
    state.watched_s = round(now_s - snapshot.since_s, 3)
    state.totals = DashboardTotals(
        running=stats.num_running,
        waiting=stats.num_waiting,
        max_running=max_running,
        steps=stats.num_steps,
        preemptions=stats.num_preemptions,
        prefix_queries=stats.prefix_cache_queries,
        prefix_hits=stats.prefix_cache_hits,
        draft_tokens=stats.drafts.num_draft_tokens,
        accepted_tokens=stats.drafts.num_accepted_tokens,
        restarts=restarts,
    )
    state.blocks = DashboardBlocks(
        total=blocks.total,
        held=blocks.held,
        shared=blocks.shared,
        cached=blocks.cached,
        free=blocks.free,
        block_size=blocks.block_size,
        wasted_slots=blocks.wasted_slots,
        per_cell=cells.per_cell,
        owners=cells.owners,
        num_held=cells.num_held,
        references=cells.references,
    )
    state.steps = [_step(step, now_s) for step in snapshot.steps]
    state.seconds = [_second(second, int(now_s)) for second in snapshot.seconds]
    state.requests = [
        _request(life, now_s, unread_s.get(life.id, 0.0)) for life in snapshot.requests
    ]


def short_id(id: str) -> str:
    """The end of an id, with its choice.

    Enough to match an id that a client has, but not to read what is stored under it.
    """
    whole, slash, choice = id.partition("/")
    end = whole[-_ID_LENGTH:] if len(whole) > 2 * _ID_LENGTH else "…"
    return f"{end}{slash}{choice}"


def _step(step: StepRecord, now_s: float) -> DashboardStep:
    return DashboardStep(
        _ms(now_s - step.ended_s),
        _ms(step.duration_s),
        step.num_decodes,
        step.num_prompts,
        step.num_prompt_tokens,
        step.num_drafts,
        step.num_accepted,
        step.num_passes,
        step.num_preempted,
        step.num_output_tokens,
    )


def _second(second: SecondRecord, now: int) -> DashboardSecond:
    return DashboardSecond(
        now - second.second,
        second.num_steps,
        second.num_prompt_tokens,
        second.num_output_tokens,
        second.num_running,
        second.num_waiting,
    )


def _request(life: RequestRecord, now_s: float, unread_s: float) -> DashboardRequest:
    end_s = now_s if life.ended_s is None else life.ended_s
    return DashboardRequest(
        id=short_id(life.id),
        tenant=life.tenant,
        background=life.background,
        status=_status(life),
        prompt_tokens=life.num_prompt,
        cached_tokens=life.num_cached,
        output_tokens=life.num_output,
        max_output_tokens=life.max_output,
        blocks=life.num_blocks,
        preemptions=life.num_preemptions,
        phases=[
            DashboardPhase(kind, _ms(seconds)) for kind, seconds in phase_durations(life, now_s)
        ],
        total_ms=_ms(end_s - life.phases[0].began_s),
        ended_ago_ms=None if life.ended_s is None else _ms(now_s - life.ended_s),
        finish_reason=life.finish_reason,
        error=life.error,
        why=why_slow(life, now_s, unread_s),
    )


def _status(life: RequestRecord) -> RequestStatus:
    if life.finish_reason is None:
        return life.phases[-1].kind
    if life.finish_reason == "error":
        return "failed"
    return "aborted" if life.finish_reason == "abort" else "done"


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 2)
