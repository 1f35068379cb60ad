"""One sequence on its way through the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine.kv_cache.pool import BlockTable
from engine.kv_cache.prefix import PrefixChain
from engine.types import Request


class Status(enum.Enum):
    """Where a sequence is kept. It says nothing about progress: ``num_computed`` does."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request and how far it has come. Written by the Scheduler alone.

    There is no prefill and no decode: ``num_computed`` chases ``len(token_ids)``, and when it
    has caught up the next token is sampled. A cached prefix starts the chase further on, and a
    preemption starts it over.
    """

    request: Request
    id: str
    order: int  # of arrival; unique
    token_ids: list[int]  # prompt, then output; only ever grows
    num_prompt: int
    min_num_tokens: int  # of prompt and output: no stop token ends it before
    max_num_tokens: int  # of prompt and output: it ends there
    stop_ids: frozenset[int]
    chain: PrefixChain

    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose keys and values are cached, by the steps planned so far
    table: BlockTable = field(default_factory=BlockTable)  # a new one after each preemption
    known_to_runner: bool = False

    leader: Sequence | None = None  # shares its blocks with this one, if it can, at admission
    forks: list[Sequence] = field(default_factory=list)  # wait for this one's prompt

    num_preemptions: int = 0
    num_cached: int | None = None  # prompt tokens found in the cache when first admitted
    cached_told: bool = False
    num_prompt_logprobs: int = 0  # told so far; a recomputed prompt brings them again
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt positions must be computed even where their blocks are cached."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt - 1
