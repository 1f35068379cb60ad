"""Judging drafts: which of them a step keeps, and what comes in place of the first it refuses.

A group is a text's newest token and the drafts behind it, each with the logits that follow it.
None of this waits for a device.
"""

from __future__ import annotations

import torch

from kernels.reference.sampling import sample_gumbel
from kernels.reference.sampling_step import position_keys

# Streams of randomness at one (seed, position); the ordinary draw of a token is stream 0.
DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2, 3

NO_DRAFT = -1  # what follows the last token of a group


def accept_drafts(
    newest: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    is_kept: torch.Tensor,
    sizes: torch.Tensor,
) -> torch.Tensor:
    """Count the drafts of each group before the first that is refused, and keep the token behind
    them where the next step's inputs look for it.

    Args:
        newest: [slots] int64, the last token chosen for each request; written.
        slots: [n] int32, of the judged tokens, group by group.
        token_ids: [n] int64, what was chosen behind each.
        is_kept: [n] bool, whether that is the draft there; not looked at where there is none.
        sizes: [groups] int32, tokens of each.

    Returns:
        [groups] int64.
    """
    ends = sizes.long().cumsum(0)
    begins = ends - sizes
    places = torch.arange(is_kept.numel(), device=is_kept.device)
    is_refused = ~is_kept
    is_refused.index_fill_(0, ends - 1, True)
    # Of each token, how many were refused up to and with it, in all groups so far.
    num_refused = is_refused.long().cumsum(0)
    groups = torch.repeat_interleave(
        torch.arange(sizes.numel(), device=sizes.device), sizes.long(), output_size=places.numel()
    )
    before = num_refused[begins] - is_refused[begins].long()
    is_before_first = num_refused == before[groups]
    accepted = torch.zeros_like(ends).index_add_(0, groups, is_before_first.long())
    newest[slots[begins].long()] = token_ids[begins + accepted]
    return accepted


def judge_drafts(
    wanted: torch.Tensor,
    proposed: torch.Tensor | None,
    draft_ids: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling of drafts, after which each token is distributed as without them.

    A draft x is kept with probability min(1, q(x) / p(x)); in place of a refused one a token is
    drawn from max(0, q - p), normalised (Leviathan et al. 2023, algorithm 1; Chen et al. 2023,
    algorithm 2). Of a guess that was made without chance p is 1 at its token.

    Args:
        wanted: [n, vocab] float32, q: the model's distribution where the draft stands.
        proposed: [n, vocab] float32, p: that from which the draft was drawn; None: no chance in it.
        draft_ids: [n] int64, the drafts x.
        seeds: [n] int64, of the requests.
        positions: [n] int64, of the drafts.

    Returns:
        The tokens [n] int64, and which of them are the drafts [n] bool.
    """
    at = draft_ids.unsqueeze(1)
    q = wanted.gather(1, at).squeeze(1)
    if proposed is None:
        p = torch.ones_like(q)
        rest = wanted.scatter(1, at, 0.0)
    else:
        p = proposed.gather(1, at).squeeze(1)
        rest = (wanted - proposed).clamp_(min=0.0)
    is_kept = uniform(seeds, positions) * p.double() < q.double()
    # Where nothing is left, q is p up to rounding, and nothing is refused but by rounding.
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0.0, rest, wanted)
    return torch.where(is_kept, draft_ids, draw(rest, seeds, positions, RESIDUAL_STREAM)), is_kept


def draw(
    shares: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int
) -> torch.Tensor:
    """A token of each row, by a stream of randomness of its own.

    Args:
        shares: [n, vocab] float32, not negative, in proportion to what each token is drawn with.
        seeds: [n] int64, of the requests.
        positions: [n] int64, of the tokens.
        stream: one of the above.

    Returns:
        [n] int64.
    """
    return sample_gumbel(shares.log(), position_keys(seeds, positions, stream))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number in (0, 1) of each (seed, position), to keep or refuse a draft by: [n] float64."""
    keys = position_keys(seeds, positions, ACCEPT_STREAM)[:, 0]
    return ((keys & 0x7FFFFFFF).double() + 0.5) * 2.0**-31
