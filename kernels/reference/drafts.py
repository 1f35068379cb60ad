"""Verification of drafts: which ones a step accepts, and what replaces the first rejected one.

A group is a sequence's newest token and the drafts after it, each with the logits that follow it.
Nothing here waits for a device.
"""

from __future__ import annotations

import torch

from kernels.reference.sampling import sample_gumbel
from kernels.reference.sampling_step import position_keys

# Random streams at one (seed, position); the ordinary sampling of a token uses stream 0.
DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2, 3

NO_DRAFT = -1  # follows the last token of a group


def accept_drafts(
    newest: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    is_kept: torch.Tensor,
    sizes: torch.Tensor,
) -> torch.Tensor:
    """Count each group's drafts before the first rejection, and store the token after them as the
    newest.

    Args:
        newest: [slots] int64, the last sampled token of each request; updated.
        slots: [n] int32, of the verified tokens, group by group.
        token_ids: [n] int64, the token sampled after each.
        is_kept: [n] bool, whether that equals the draft; ignored where there is no draft.
        sizes: [groups] int32, tokens of each.

    Returns:
        [groups] int64, the number of drafts before the first rejected one.
    """
    ends = sizes.long().cumsum(0)
    begins = ends - sizes
    places = torch.arange(is_kept.numel(), device=is_kept.device)
    is_refused = ~is_kept
    is_refused.index_fill_(0, ends - 1, True)
    # For each token, the number of rejections up to and including it, over all groups so far.
    num_refused = is_refused.long().cumsum(0)
    groups = torch.repeat_interleave(
        torch.arange(sizes.numel(), device=sizes.device), sizes.long(), output_size=places.numel()
    )
    before = num_refused[begins] - is_refused[begins].long()
    is_before_first = num_refused == before[groups]
    accepted = torch.zeros_like(ends).index_add_(0, groups, is_before_first.long())
    newest[slots[begins].long()] = token_ids[begins + accepted]
    return accepted


def verify_drafts(
    wanted: torch.Tensor,
    proposed: torch.Tensor | None,
    draft_ids: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify drafts by rejection sampling, which leaves each token's distribution unchanged.

    A draft x is accepted with probability min(1, q(x) / p(x)); a rejected one is replaced by a
    sample from max(0, q - p), normalised (Leviathan et al. 2023, algorithm 1; Chen et al. 2023,
    algorithm 2). For a deterministic draft, p is 1 at its token.

    Args:
        wanted: [n, vocab] float32, q: the model's distribution at the draft's position.
        proposed: [n, vocab] float32, p: the distribution the draft was sampled from; None: drafts
            are deterministic.
        draft_ids: [n] int64, the drafts x.
        seeds: [n] int64, of the requests.
        positions: [n] int64, of the drafts.

    Returns:
        The tokens [n] int64, and whether each is the accepted draft [n] bool.
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
    # If nothing is left, q equals p up to rounding, and only rounding can cause a rejection.
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0.0, rest, wanted)
    return torch.where(
        is_kept, draft_ids, sample_from_probs(rest, seeds, positions, RESIDUAL_STREAM)
    ), is_kept


def sample_from_probs(
    shares: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, stream: int
) -> torch.Tensor:
    """Sample a token for each row from a separate random stream.

    Args:
        shares: [n, vocab] float32, non-negative, proportional to the probabilities.
        seeds: [n] int64, of the requests.
        positions: [n] int64, of the tokens.
        stream: one of the constants above.

    Returns:
        [n] int64.
    """
    return sample_gumbel(shares.log(), position_keys(seeds, positions, stream))


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a number in (0, 1) for each (seed, position), to accept or reject by: [n] float64."""
    keys = position_keys(seeds, positions, ACCEPT_STREAM)[:, 0]
    return ((keys & 0x7FFFFFFF).double() + 0.5) * 2.0**-31
