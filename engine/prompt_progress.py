"""The progress of a prompt, for clients that request it."""

from __future__ import annotations

import msgspec


class PromptProgress(msgspec.Struct, frozen=True, gc=False):
    """One request's progress before its first token. Made by ``engine/scheduler/progress.py``."""

    total: int  # tokens of the prompt
    cached: int  # of these, tokens found in the cache on first admission
    processed: int  # tokens computed so far or found in the cache
    elapsed_s: float  # since first admission; 0 before it
    queue_position: int | None = None  # requests to be admitted before it; None: it has been
    # admitted, or the position is unknown
