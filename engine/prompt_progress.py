"""How far a prompt has come, for a client that asked to be told while it waits."""

from __future__ import annotations

import msgspec


class PromptProgress(msgspec.Struct, frozen=True, gc=False):
    """Of one request, before its first token. Made by ``engine/scheduler/progress.py``."""

    total: int  # tokens of the prompt
    cached: int  # of those, found in the cache when it was first admitted
    processed: int  # of all, computed by now or found
    elapsed_s: float  # since it was first admitted; 0 while it waits for that
    queue_position: int | None = None  # how many are admitted before it; None: it waits no longer,
    # or nobody knows
