"""Beam search: finds the most likely texts as wholes, not the most likely token at each position.

This is pure bookkeeping over log-probabilities. Its callers (``engine/beam_streams.py`` for the
server, the offline ``LLM``) repeatedly let the engine compute one more token for each beam:

    search = make_search(request, params, engine.info)
    while not search.is_done:
        search.advance([one position's logprobs for beam in search.beams])
    search.best

The rules are those of Hugging Face ``generate(num_beams=...)``. Each step considers all
continuations of all beams. Those that end, and are among the ``width`` best, become hypotheses.
Their score is the summed log-probability over ``length ** length_penalty``. The ``width`` best that
continue are the next beams. Length is that of the output alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from engine.argument_types import settle_fields
from engine.errors import InvalidParameter
from engine.types import EngineInfo, FinishReason, Request, SamplingParams, TokenLogprobs

MAX_BEAM_WIDTH = 64
MAX_BEAM_STOPS = 32
MAX_LENGTH_PENALTY = 10.0

EarlyStopping = bool | Literal["never"]


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """The width of the search, and when it may stop."""

    width: int = 4
    length_penalty: float = 1.0  # above 0 favours longer texts, below 0 shorter ones
    # True: stop once there are ``width`` hypotheses. False: stop when the best beam, if it ended
    # now, would not be among them. "never": stop when it could not be, however long it became.
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        settle_fields(self)
        if not 1 <= self.width <= MAX_BEAM_WIDTH:
            problem = f"'beam_width' must be between 1 and {MAX_BEAM_WIDTH}"
            raise InvalidParameter(problem, param="beam_width")
        if not abs(self.length_penalty) <= MAX_LENGTH_PENALTY:
            limit = MAX_LENGTH_PENALTY
            problem = f"'length_penalty' must be between {-limit:g} and {limit:g}"
            raise InvalidParameter(problem, param="length_penalty")


class Beam(NamedTuple):
    """A text that is still being extended."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # of its tokens
    total: float = 0.0  # sum of their log-probabilities


class Hypothesis(NamedTuple):
    """A finished text."""

    beam: Beam
    score: float  # the total over length ** length_penalty
    finish_reason: FinishReason
    stop_token_id: int | None


class _Candidate(NamedTuple):
    """A beam extended by one token."""

    total: float
    parent: Beam
    position_logprobs: TokenLogprobs
    token_id: int
    logprob: float
    rank: int


class BeamSearch:
    """The search over the continuations of one prompt.

    Args:
        params: the width, and when to stop.
        max_tokens: length at which a text ends, 1 or more.
        stop_ids: tokens that end a text and are its last.
        num_top: alternatives to keep with each token, for clients that request them.
    """

    def __init__(
        self, params: BeamParams, max_tokens: int, stop_ids: Iterable[int], *, num_top: int = 0
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._stop_ids = frozenset(stop_ids)
        self._num_top = num_top
        self._hypotheses: list[Hypothesis] = []  # the best first, at most ``width``
        self.beams: list[Beam] = [Beam()]  # to be extended, the most likely first
        self.is_done = False

    @property
    def num_logprobs(self) -> int:
        """How many of the most likely tokens ``advance`` needs for each beam.

        A beam can contribute at most ``width`` continuations, besides one candidate per stop token.
        """
        return max(self._num_top, self._params.width + len(self._stop_ids))

    @property
    def best(self) -> list[Hypothesis]:
        """The hypotheses, best first: ``width`` of them, unless the vocabulary is smaller."""
        return list(self._hypotheses)

    def advance(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Extend the search by one token.

        Args:
            logprobs: for each beam, in order, the most likely tokens at its next position.
        """
        width = self._params.width
        length = len(self.beams[0].token_ids) + 1
        candidates = sorted(
            (
                _Candidate(beam.total + logprob, beam, position, token_id, logprob, rank)
                for beam, position in zip(self.beams, logprobs, strict=True)
                for rank, (token_id, logprob) in enumerate(
                    zip(position.top_ids, position.top_logprobs, strict=True), 1
                )
            ),
            key=lambda candidate: -candidate.total,
        )
        is_last = length >= self._max_tokens
        for candidate in candidates[:width]:
            if is_last or candidate.token_id in self._stop_ids:
                self._hypotheses.append(self._finish(candidate))
        self._hypotheses = sorted(self._hypotheses, key=lambda found: -found.score)[:width]
        going_on = [c for c in candidates if c.token_id not in self._stop_ids][:width]
        self.beams = [self._extend(candidate) for candidate in going_on]
        self.is_done = is_last or not self.beams or self._has_enough(length)

    def _has_enough(self, length: int) -> bool:
        """Whether no beam needs to be extended further."""
        params, found = self._params, self._hypotheses
        if len(found) < params.width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = self._max_tokens
        return self.beams[0].total / length**params.length_penalty <= found[-1].score

    def _finish(self, candidate: _Candidate) -> Hypothesis:
        beam = self._extend(candidate)
        stops = candidate.token_id in self._stop_ids
        return Hypothesis(
            beam,
            beam.total / len(beam.token_ids) ** self._params.length_penalty,
            "stop" if stops else "length",
            candidate.token_id if stops else None,
        )

    def _extend(self, candidate: _Candidate) -> Beam:
        parent, logprobs = candidate.parent, candidate.position_logprobs
        entry = TokenLogprobs(
            token_id=candidate.token_id,
            logprob=candidate.logprob,
            rank=candidate.rank,
            top_ids=logprobs.top_ids[: self._num_top],
            top_logprobs=logprobs.top_logprobs[: self._num_top],
        )
        return Beam(
            (*parent.token_ids, candidate.token_id), (*parent.logprobs, entry), candidate.total
        )


def one_token_request(
    leader: Request, suffix: str, token_ids: Sequence[int], num_top: int
) -> Request:
    """The request for one more token after ``token_ids``, with its log-probabilities."""
    return msgspec.structs.replace(
        leader,
        id=f"{leader.id}.{suffix}",
        follows=bool(token_ids),
        is_followed=True,
        resumed_token_ids=tuple(token_ids),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=len(token_ids) + 1, ignore_eos=True, logprobs=num_top
        ),
    )


def make_search(
    leader: Request,
    params: BeamParams,
    info: EngineInfo,
) -> BeamSearch:
    """The search that answers ``leader`` with the model described by ``info``.

    Raises:
        InvalidParameter: the vocabulary is too small for the width, or there are too many stop
            tokens.
    """
    sampling = leader.sampling
    limit = sampling.max_tokens
    if limit is None:
        limit = info.max_model_len - len(leader.prompt_token_ids)
    stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else info.eos_token_ids)}
    if len(stop_ids) > MAX_BEAM_STOPS:
        raise InvalidParameter(
            "'stop_token_ids' and the model's own ends must be at most "
            f"{MAX_BEAM_STOPS} tokens in a beam search",
            param="stop_token_ids",
        )
    search = BeamSearch(params, limit, stop_ids, num_top=sampling.logprobs or 0)
    if search.num_logprobs > info.vocab_size:
        raise InvalidParameter("'beam_width' exceeds the vocabulary", param="beam_width")
    return search
