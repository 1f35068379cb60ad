"""A response's latency breakdown, included if ``return_timings`` is set."""

from __future__ import annotations

import time

from msgspec import Struct

from engine.types import RequestTimings


class Timings(Struct, kw_only=True):
    """The times of one choice, in milliseconds.

    The counts are null if a stop string ended the choice, which the engine does not watch for.
    """

    queue_ms: float | None = None  # until its first step
    prefill_ms: float | None = None  # from there to its first token, within the engine
    decode_ms: float | None = None  # from there to its last
    first_token_ms: float  # from its arrival until its first token was ready to be sent
    total_ms: float  # from its arrival until its last token was
    num_preemptions: int | None = None
    num_draft_tokens: int | None = None  # draft tokens proposed
    num_accepted_tokens: int | None = None  # draft tokens accepted


def times_until_now(arrival_s: float, scheduled_s: float, first_token_s: float) -> RequestTimings:
    """The times of a choice that is ended here and now, before the engine has reported them.

    Args:
        arrival_s: of its request.
        scheduled_s: when the engine began it; 0 if that is unknown.
        first_token_s: when its first token arrived here; 0 if there was none.
    """
    return RequestTimings(arrival_s, scheduled_s, first_token_s, time.monotonic())


def timings_of(times: RequestTimings, first_token_s: float, is_reported: bool) -> Timings:
    """The timings of a choice that ends now.

    Args:
        times: its times within the engine.
        first_token_s: when its first token arrived here; 0 if there was none.
        is_reported: whether ``times`` are the engine's report, so that its counts are known.
    """
    now = time.monotonic()
    whole = Timings(
        first_token_ms=_ms(times.arrival_s, first_token_s or now),
        total_ms=_ms(times.arrival_s, now),
    )
    if times.scheduled_s:
        first_s = times.first_token_s or times.finished_s
        whole.queue_ms = _ms(times.arrival_s, times.scheduled_s)
        whole.prefill_ms = _ms(times.scheduled_s, first_s)
        whole.decode_ms = _ms(first_s, times.finished_s)
    if is_reported:
        whole.num_preemptions = times.num_preemptions
        whole.num_draft_tokens = times.num_draft_tokens
        whole.num_accepted_tokens = times.num_accepted_tokens
    return whole


def _ms(begin_s: float, end_s: float) -> float:
    return round(max(0.0, end_s - begin_s) * 1e3, 3)
