"""Where the time of an answer went, told with it where ``return_timings`` asks for it."""

from __future__ import annotations

from msgspec import Struct

from engine.types import RequestTimings


class Timings(Struct, kw_only=True):
    """The times of one choice, in milliseconds. Null: its end was found outside the engine (by a
    stop string, or in a beam search), which then has told nothing.
    """

    queue_ms: float | None = None  # until its first step
    prefill_ms: float | None = None  # from there to its first token, in the engine
    decode_ms: float | None = None  # from there to its last
    first_token_ms: float  # from its arrival until its first token was there to be sent
    total_ms: float  # and until its last was
    num_preemptions: int | None = None
    num_draft_tokens: int | None = None  # guessed ahead for it, and
    num_accepted_tokens: int | None = None  # kept of them


def timings_of(
    arrival_s: float, first_token_s: float, finished_s: float, told: RequestTimings | None
) -> Timings:
    """What is known of a choice that has ended; times are of the monotonic clock.

    Args:
        arrival_s: of its request.
        first_token_s: when its first token came here; 0 where there was none.
        finished_s: when its end did.
        told: by the engine.
    """
    whole = Timings(
        first_token_ms=_ms(arrival_s, first_token_s or finished_s),
        total_ms=_ms(arrival_s, finished_s),
    )
    if told is None or not told.scheduled_s:
        return whole
    first_s = told.first_token_s or told.finished_s
    whole.queue_ms = _ms(told.arrival_s, told.scheduled_s)
    whole.prefill_ms = _ms(told.scheduled_s, first_s)
    whole.decode_ms = _ms(first_s, told.finished_s)
    whole.num_preemptions = told.num_preemptions
    whole.num_draft_tokens = told.num_draft_tokens
    whole.num_accepted_tokens = told.num_accepted_tokens
    return whole


def _ms(begin_s: float, end_s: float) -> float:
    return round(max(0.0, end_s - begin_s) * 1e3, 3)
