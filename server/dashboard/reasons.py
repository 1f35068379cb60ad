"""The main cause of a request's latency, in one line.

Each cause has the seconds that it can account for; the line names the largest.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.snapshot import PhaseKind, RequestRecord

_QUICK_S = 0.3  # faster than that needs no explanation
_MIN_SHARED_ROWS = 4.0  # rows of a step above which batching is worth mentioning
_MIN_MIXED_SHARE = 0.25  # share of steps with other prompts in them above which that is mentioned
_LATE_READER_S = 1.0


class Cause(NamedTuple):
    """A cause of latency."""

    seconds: float
    line: str


def why_slow(life: RequestRecord, now_s: float, unread_s: float = 0.0) -> str:
    """The main cause of a request's time so far; empty for a quick request.

    Args:
        life: the request's.
        now_s: the time of its snapshot.
        unread_s: how long its complete answer has waited, or waited, for its client.
    """
    causes = [cause for cause in _causes(life, now_s, unread_s) if cause.seconds > 0]
    total_s = (life.ended_s or now_s) - life.phases[0].began_s + unread_s
    if not causes or total_s < _QUICK_S:
        return ""
    return max(causes).line


def phase_durations(life: RequestRecord, now_s: float) -> list[tuple[PhaseKind, float]]:
    """The phases of a life, with the seconds that each has taken so far."""
    ends = [phase.began_s for phase in life.phases[1:]]
    ends.append(now_s if life.ended_s is None else life.ended_s)
    return [
        (phase.kind, max(0.0, end - phase.began_s))
        for phase, end in zip(life.phases, ends, strict=True)
    ]


def _causes(life: RequestRecord, now_s: float, unread_s: float) -> list[Cause]:
    images = audio = grammar = queued = prompt = again = decode = 0.0
    preempted = False
    for kind, seconds in phase_durations(life, now_s):
        preempted = preempted or kind == "preempted"
        if kind == "images":
            images += seconds
        elif kind == "audio":
            audio += seconds
        elif kind == "grammar":
            grammar += seconds
        elif kind == "queued":
            queued += seconds
        elif kind == "decode":
            decode += seconds
        elif preempted:
            again += seconds
        else:
            prompt += seconds
    times = "once" if life.num_preemptions == 1 else f"{life.num_preemptions} times"
    causes = [
        Cause(images, f"reading its images took {_format_seconds(images)}"),
        Cause(audio, f"reading its audio took {_format_seconds(audio)}"),
        Cause(grammar, f"compiling its grammar took {_format_seconds(grammar)}"),
        Cause(queued, f"waited {_format_seconds(queued)} in the queue"),
        Cause(prompt, _prompt(life, prompt)),
        Cause(again, f"preempted {times}: {_format_seconds(again)} to wait and recompute"),
        Cause(decode, _decode(life, decode)),
    ]
    if unread_s >= _LATE_READER_S:
        line = f"slow client: finished {_format_seconds(unread_s)} before it was read"
        causes.append(Cause(unread_s, line))
    return causes


def _prompt(life: RequestRecord, seconds: float) -> str:
    cached = f" ({life.num_cached:,} cached)" if life.num_cached else ""
    steps = f", in {life.num_prompt_steps} steps" if life.num_prompt_steps > 1 else ""
    return f"a prompt of {life.num_prompt:,} tokens{cached} took {_format_seconds(seconds)}{steps}"


def _decode(life: RequestRecord, seconds: float) -> str:
    pace = f"{seconds / max(1, life.num_output) * 1e3:.3g} ms per token"
    num_steps = max(1, life.num_steps - life.num_prompt_steps)
    crossed = life.num_mixed_steps / num_steps
    if crossed >= _MIN_MIXED_SHARE:
        return f"{crossed:.0%} of its steps also computed other prompts: {pace}"
    if life.mean_rows >= _MIN_SHARED_ROWS:
        return f"shared its steps with {life.mean_rows - 1:.0f} other requests: {pace}"
    return f"a long answer: {life.num_output:,} tokens, {pace}"


def _format_seconds(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100.0 else f"{seconds:.0f} s"
