"""Which requests may have killed an engine, and what becomes of them.

An engine names the requests that it begins to work on (``engine.frames.Begun``), so a request that
only waited when it died is not suspected. Those begun are: one of them may kill every engine that
gets it. All requests are resumed, but the suspects are admitted a few at a time
(``engine/scheduler/suspect_gate.py``), each until it has made some progress. If the next engine
dies as well, then of one of those few, which fail. The others are acquitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.errors import RequestFailed
from engine.types import Request

if TYPE_CHECKING:
    from engine.streams import Stream

# Engines that may die in a row with a request that makes no progress in between; with the next one
# it is failed. That is one death before the engine would be given up (``engine/supervisor.py``).
MAX_FRUITLESS = 1
# Tokens. Most requests that kill do so where they did before, at once, and some go on for a few
# steps. With more, streams would stand still for longer after a death that is nobody's fault.
LEAST_PROGRESS = 4

Family = tuple[tuple[int, ...], tuple[bytes, ...]]


def family_of(request: Request) -> Family:
    """What a request has in common with its forks, and with others like it.

    What one of them does to an engine the others may do as well.
    """
    return request.prompt_token_ids, tuple(each.digest for each in request.media)


def judge(streams: Sequence[Stream]) -> list[Stream]:
    """Fail those of a dead engine's streams that it died of, and others like them that have made as
    little progress in it; return the rest.

    The suspects come first, with those that had got furthest last: what kills an engine mostly does
    so soon. The others follow in the order given.
    """
    blamed = {family_of(one.request) for one in streams if one.would_be_blamed}
    remaining: list[Stream] = []
    for stream in streams:
        if stream.num_new < LEAST_PROGRESS and family_of(stream.request) in blamed:
            stream.fail(RequestFailed("the engine has died too often with this request"))
            continue
        remaining.append(stream)
        if blamed:
            stream.acquit()
        else:
            stream.count_death()
    suspects = [stream for stream in remaining if stream.is_suspect]
    progress: dict[Family, int] = {}
    for stream in suspects:
        family = family_of(stream.request)
        progress[family] = min(progress.get(family, stream.num_new), stream.num_new)
    suspects.sort(key=lambda stream: progress[family_of(stream.request)])
    return [*suspects, *(stream for stream in remaining if not stream.is_suspect)]
