"""One sequence on its way through the engine."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.images.nouns import Image
from engine.kv_cache.pool import BlockTable
from engine.kv_cache.prefix import PrefixChain
from engine.types import Request

if TYPE_CHECKING:
    from engine.grammar.backend import CompiledGrammar
    from engine.scheduler.pooled import Pooled
    from engine.speculation.speculator import Draft


class Status(enum.Enum):
    """Where a sequence is kept. It says nothing about progress: ``num_computed`` does."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request and how far it has come. Written by the Scheduler alone.

    There is no prefill and no decode: ``num_computed`` chases ``num_tokens``, and when it has
    caught up the next token is sampled. A cached prefix starts the chase further on, and a
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
    wholes: tuple[tuple[int, int], ...]  # from, to: tokens that are computed by one step
    follows_output: bool  # its next token cannot be chosen before the one before it is known
    is_plain: bool  # see SamplingParams
    grammar: CompiledGrammar | None = None

    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose keys and values are cached, by the steps planned so far
    num_landed: int = 0  # at least so many of them by steps whose results are there
    num_pending: int = 0  # tokens that planned steps choose, behind token_ids
    num_ahead: int = 0  # of those, chosen by later passes of the step that chooses its next token
    draft_ids: tuple[int, ...] = ()  # under verification by the step that chooses its next token
    # Not planned before its newest token is known: drafts may follow, or passes are not all made.
    awaits_token: bool = False
    draft: Draft | None = None  # who guesses for it, and how well
    table: BlockTable = field(default_factory=BlockTable)  # a new one after each preemption
    known_to_runner: bool = False

    branch: int = 0  # tokens that others begin with too, and of which there is no snapshot
    leader: Sequence | None = None  # shares its blocks with this one, if it can, at admission
    forks: list[Sequence] = field(default_factory=list)  # wait for this one's prompt

    pooled: Pooled | None = None  # what its prompt has given so far, where a vector is asked for

    num_preemptions: int = 0
    num_given_up: int = 0  # tokens that had been computed when it was preempted
    num_awaited: int = 0  # steps in a row in which its prefix was on its way to the host
    num_cached: int | None = None  # prompt tokens found in the cache when first admitted
    cached_told: bool = False
    num_prompt_logprobs: int = 0  # told so far; a recomputed prompt brings them again
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens there are once the planned steps are done."""
        return len(self.token_ids) + self.num_pending

    def uncut(self, end: int) -> int:
        """Where a step that goes on to ``end`` may end: not within what is computed whole. It ends
        before that, or behind it where it begins there."""
        for begin, behind in self.wholes:
            if begin < end < behind:
                return begin if begin > self.num_computed else behind
        return end

    @property
    def owes_prompt(self) -> bool:
        """Whether prompt positions must be computed even where their blocks are cached."""
        pooling = self.request.pooling
        if pooling is not None:
            return pooling.needs_all_positions
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt - 1


def sequence_of(
    request: Request,
    order: int,
    chain: PrefixChain,
    max_len: int,
    eos: frozenset[int],
    grammar: CompiledGrammar | None = None,
    *,
    whole_images: int | None = None,
) -> Sequence:
    """A waiting sequence for ``request``, in a context of ``max_len`` tokens.

    A text that is held to a grammar ends where the mask lets it: ``min_tokens`` and ``ignore_eos``
    are the mask's business. With ``whole_images`` the tokens of an image are computed by one step;
    it is the side of a cell, in pixels.

    Raises:
        ContextLengthExceeded: prompt and output can never fit.
        InvalidParameter: the prompt is empty.
    """
    sampling = request.sampling
    wanted = sampling.max_tokens if request.pooling is None else 0
    num_prompt = len(request.prompt_token_ids)
    is_held = sampling.grammar is not None
    stop_ids = frozenset() if sampling.ignore_eos and not is_held else eos
    return Sequence(
        request=request,
        id=request.id,
        order=order,
        token_ids=[*request.prompt_token_ids, *request.resumed_token_ids],
        num_prompt=num_prompt,
        min_num_tokens=num_prompt + (0 if is_held else sampling.min_tokens),
        max_num_tokens=_checked_length(num_prompt, wanted, max_len),
        stop_ids=stop_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else stop_ids,
        chain=chain,
        wholes=_spans(request.images, whole_images),
        follows_output=sampling.follows_output,
        is_plain=sampling.is_plain,
        grammar=grammar,
    )


def _spans(images: Iterable[Image], cell: int | None) -> tuple[tuple[int, int], ...]:
    return () if cell is None else tuple(image.span(cell) for image in images)


def leader_of(seq: Sequence, live: Mapping[str, Sequence]) -> Sequence | None:
    """The live sequence whose prompt ``seq`` can share; without one it is an ordinary one."""
    request = seq.request
    leader = live.get(request.fork_of) if request.fork_of is not None else None
    if leader is None or seq.owes_prompt:
        return None
    own, other = request, leader.request
    is_same = (own.cache_salt, own.adapter) == (other.cache_salt, other.adapter)
    is_same = is_same and own.images == other.images
    return leader if is_same and own.prompt_token_ids == other.prompt_token_ids else None


def _checked_length(num_prompt: int, wanted: int | None, max_len: int) -> int:
    """The most tokens that prompt and output may have together."""
    if not num_prompt:
        raise InvalidParameter("the prompt must have at least one token", param="prompt")
    total = num_prompt + (1 if wanted is None else wanted)
    if total > max_len:
        output = "at least one" if wanted is None else f"{wanted}"
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_len} tokens. However, you requested "
            f"{total} tokens ({num_prompt} in the prompt, {output} for the output). "
            "Please reduce the length of the prompt or the output."
        )
    return max_len if wanted is None else total
