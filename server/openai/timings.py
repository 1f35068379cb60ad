"""A response's latency breakdown, included if ``return_timings`` is set."""

from __future__ import annotations

from msgspec import Struct

from engine.types import RequestTimings


class Timings(Struct, kw_only=True):
    """The times of one choice, in milliseconds.

    Null: the choice was ended outside the engine (by a stop string or in a beam search), which then
    reports nothing.
    """

    queue_ms: float | None = None  # until its first step
    prefill_ms: float | None = None  # from there to its first token, within the engine
    decode_ms: float | None = None  # from there to its last
    first_token_ms: float  # from its arrival until its first token was ready to be sent
    total_ms: float  # from its arrival until its last token was
    num_preemptions: int | None = None
    num_draft_tokens: int | None = None  # draft tokens proposed
    num_accepted_tokens: int | None = None  # draft tokens accepted


def timings_of(
    arrival_s: float, first_token_s: float, finished_s: float, reported: RequestTimings | None
) -> Timings:
    """The timings of a choice that has ended; arguments are times of the monotonic clock.

    Args:
        arrival_s: of its request.
        first_token_s: when its first token arrived here; 0 if there was none.
        finished_s: when its end arrived here.
        reported: the engine's report.
    """
    whole = Timings(
        first_token_ms=_ms(arrival_s, first_token_s or finished_s),
        total_ms=_ms(arrival_s, finished_s),
    )
    if reported is None or not reported.scheduled_s:
        return whole
    first_s = reported.first_token_s or reported.finished_s
    whole.queue_ms = _ms(reported.arrival_s, reported.scheduled_s)
    whole.prefill_ms = _ms(reported.scheduled_s, first_s)
    whole.decode_ms = _ms(first_s, reported.finished_s)
    whole.num_preemptions = reported.num_preemptions
    whole.num_draft_tokens = reported.num_draft_tokens
    whole.num_accepted_tokens = reported.num_accepted_tokens
    return whole


def _ms(begin_s: float, end_s: float) -> float:
    return round(max(0.0, end_s - begin_s) * 1e3, 3)
