"""Judging drafts: which of them a step keeps, and what comes in place of the first it refuses.

A group is a text's newest token and the drafts behind it, each with the logits that follow it.
Plain torch for every device: a few operations on rows of one step, none of which waits.
"""

from __future__ import annotations

import torch

from kernels.reference.sampling import sample_gumbel
from kernels.reference.sampling_step import position_keys

# Streams of randomness at one (seed, position); the ordinary draw of a token is stream 0.
DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2, 3

NO_DRAFT = -1  # what follows the last token of a group


def num_accepted(
    is_kept: torch.Tensor, group: torch.Tensor, within: torch.Tensor, num_groups: int, width: int
) -> torch.Tensor:
    """Drafts of each group before the first that is refused.

    Args:
        is_kept: [n] bool, whether the draft behind each judged token is what was chosen there;
            false behind the last of a group.
        group, within: [n] int64, whose it is, and its place there from 0.
        num_groups: of the step.
        width: of the largest, at least.

    Returns:
        [num_groups] int64.
    """
    grid = torch.zeros(num_groups, width, dtype=torch.int64, device=is_kept.device)
    grid[group, within] = is_kept.long()
    return grid.cumprod(dim=1).sum(dim=1)


def judge(
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
    keys = position_keys(seeds, positions, RESIDUAL_STREAM)
    return torch.where(is_kept, draft_ids, sample_gumbel(rest.log(), keys)), is_kept


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number in (0, 1) of each (seed, position), to keep or refuse a draft by: [n] float64."""
    keys = position_keys(seeds, positions, ACCEPT_STREAM)[:, 0]
    return ((keys & 0x7FFFFFFF).double() + 0.5) * 2.0**-31
