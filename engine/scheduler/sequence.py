"""A sequence: one request and its progress through the engine."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.images.types import Image
from engine.kv_cache.pool import BlockTable
from engine.kv_cache.prefix import PrefixChain
from engine.types import Request

if TYPE_CHECKING:
    from engine.grammar.backend import CompiledGrammar
    from engine.scheduler.pooling import PoolingAccumulator
    from engine.speculation.speculator import DraftState


class Status(enum.Enum):
    """Which collection holds a sequence. Progress is a separate matter; see ``num_computed``."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request and its progress. Written only by the Scheduler's parts.

    There are no prefill and decode phases. ``num_computed`` chases ``num_tokens``; once it has
    caught up, the next token is sampled. A cached prefix gives it a head start, and preemption
    resets it.
    """

    request: Request
    id: str
    order: int  # of arrival; unique
    token_ids: list[int]  # prompt, then output; only ever grows
    num_prompt: int
    min_num_tokens: int  # prompt and output; no stop token ends the sequence before this length
    max_num_tokens: int  # prompt and output; the sequence ends at this length
    stop_ids: frozenset[int]
    chain: PrefixChain
    atomic_spans: tuple[tuple[int, int], ...]  # (start, end) of spans never split between steps
    depends_on_output: bool  # sampling its next token requires knowing the previous one
    is_plain: bool  # see SamplingParams
    grammar: CompiledGrammar | None = None

    status: Status = Status.WAITING
    num_computed: int = 0  # tokens with cached keys and values, counting the steps planned so far
    # A lower bound on how many of them have been computed by completed steps.
    num_confirmed: int = 0
    num_pending: int = 0  # tokens that planned steps will sample, beyond token_ids
    num_extra_passes: int = 0  # of those, sampled by later passes of the next step to complete
    draft_ids: tuple[int, ...] = ()  # drafts being verified by the next step to complete
    # Do not plan until its newest token is known: drafts may follow, or some passes may not be run.
    should_wait_for_token: bool = False
    draft_state: DraftState | None = None  # the state of its drafting, with acceptance counts
    table: BlockTable = field(default_factory=BlockTable)  # a new one after each preemption
    known_to_runner: bool = False

    snapshot_point: int = 0  # length of a cached prefix that has no snapshot at its end; 0: none
    leader: Sequence | None = None  # whose prompt blocks it shares on admission, if possible
    forks: list[Sequence] = field(default_factory=list)  # sequences that wait for this one's prompt

    pooled: PoolingAccumulator | None = None  # partial result of a pooling request

    num_preemptions: int = 0
    num_discarded: int = 0  # tokens that were computed when it was preempted
    num_offload_waits: int = 0  # consecutive steps spent waiting for its prefix to be offloaded
    num_cached: int | None = None  # prompt tokens found in the cache when first admitted
    begin_reported: bool = False
    num_prompt_logprobs: int = 0  # reported so far; recomputing the prompt yields them again
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """The sequence's length once all planned steps are complete."""
        return len(self.token_ids) + self.num_pending

    def adjust_chunk_end(self, end: int) -> int:
        """Move ``end``, where a chunk would end, out of any span that must be computed whole.

        The chunk then ends before the span, or after it if the chunk starts with the span.
        """
        for begin, behind in self.atomic_spans:
            if begin < end < behind:
                return begin if begin > self.num_computed else behind
        return end

    @property
    def must_compute_prompt(self) -> bool:
        """Whether prompt positions must be computed even where their blocks are cached."""
        pooling = self.request.pooling
        if pooling is not None:
            return pooling.needs_all_positions
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < self.num_prompt - 1


def make_sequence(
    request: Request,
    order: int,
    chain: PrefixChain,
    max_len: int,
    eos: frozenset[int],
    grammar: CompiledGrammar | None = None,
    *,
    atomic_image_cell: int | None = None,
) -> Sequence:
    """Make a waiting sequence for ``request``, in a context of ``max_len`` tokens.

    With a grammar, the token mask decides where the text may end, so ``min_tokens`` and
    ``ignore_eos`` do not apply here. ``atomic_image_cell`` is the side of an image cell in pixels
    if all tokens of an image must be computed in one step, else None.
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
        atomic_spans=_atomic_spans(request.images, atomic_image_cell),
        depends_on_output=sampling.depends_on_output,
        is_plain=sampling.is_plain,
        grammar=grammar,
    )


def _atomic_spans(images: Iterable[Image], cell: int | None) -> tuple[tuple[int, int], ...]:
    return () if cell is None else tuple(image.span(cell) for image in images)


def find_leader(seq: Sequence, live: Mapping[str, Sequence]) -> Sequence | None:
    """The live sequence whose prompt ``seq`` can share, or None."""
    request = seq.request
    leader = live.get(request.fork_of) if request.fork_of is not None else None
    if leader is None or seq.must_compute_prompt:
        return None
    own, other = request, leader.request
    is_same = (own.cache_salt, own.adapter) == (other.cache_salt, other.adapter)
    is_same = is_same and own.media == other.media
    return leader if is_same and own.prompt_token_ids == other.prompt_token_ids else None


def _checked_length(num_prompt: int, wanted: int | None, max_len: int) -> int:
    """The maximum length of prompt and output together."""
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
