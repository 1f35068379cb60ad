"""Sampling from logits: arg-max, counter-based randomness, truncation by a threshold."""

from __future__ import annotations

import torch

_ARGMAX_CHUNK = 64
# Candidates examined before a full sort: almost every nucleus is smaller than this.
_NUM_CANDIDATES = 128


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row's largest entry: [n, vocab] -> [n] int64.

    The search has two levels if the width allows it: torch finds a maximum (``amax``) with SIMD,
    but its index one by one. A row with nan yields the index of a nan.
    """
    num_rows, width = scores.shape
    if width % _ARGMAX_CHUNK or num_rows == 0:
        return scores.argmax(dim=-1)
    chunked = scores.view(num_rows, -1, _ARGMAX_CHUNK)
    chunk = chunked.amax(dim=-1).argmax(dim=-1)
    rows = torch.arange(num_rows, device=scores.device)
    return chunk * _ARGMAX_CHUNK + chunked[rows, chunk].argmax(dim=-1)


def exponential_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return standard exponential variates, a pure function of each row's key and the token id.

    They are two keyed rounds of MurmurHash3's 32-bit finaliser (Appleby) over the token id,
    followed by inversion ``-log(1 - u)``. With 31 bits, ``u`` near 0 preserves the share of tokens
    of probability 1e-9. Only integer operations, which wrap alike on every device, come before the
    logarithm.

    Args:
        keys: [n, 2] int32, from (seed, position).
        vocab_size: number of tokens.

    Returns:
        [n, vocab_size] float32, positive and finite.
    """
    token = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    hashed = _mix(token * -1640531527 ^ keys[:, :1])  # the golden ratio, 0x9E3779B9
    hashed = _mix(hashed.add_(keys[:, 1:])).bitwise_and_(0x7FFFFFFF)
    uniform = hashed.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def sample_gumbel(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row from softmax(logits): the Gumbel-max trick (Gumbel 1954).

    ``argmax(logits - log(e))`` with e standard exponential; entries of -inf are never sampled.

    Args:
        logits: [n, vocab] float32, at least one finite entry per row.
        keys: [n, 2] int32.
    """
    return argmax(add_gumbel_noise(logits, keys))


def add_gumbel_noise(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Add Gumbel noise to logits, [n, vocab]: each row's largest is a sample from its softmax."""
    return logits - exponential_noise(keys, logits.shape[-1]).log_()


def truncation_threshold(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return the smallest logit that each row keeps under min_p, then top_k, then top_p.

    Each of the three keeps the entries at or above some value, so all of them together do too;
    equal entries are kept or dropped together. top_p: the fewest entries, likeliest first, whose
    share of what min_p and top_k left reaches top_p (Holtzman et al. 2019). min_p: entries at least
    min_p times as likely as the likeliest (Nguyen et al. 2024).

    Args:
        logits: [n, vocab] float32, after temperature.
        top_k: [n] int64; at least vocab is off.
        top_p: [n] float32; 1 is off.
        min_p: [n] float32; 0 is off.

    Returns:
        [n, 1] float32.
    """
    vocab = logits.shape[1]
    width = min(vocab, _NUM_CANDIDATES)
    candidates = logits.topk(width, dim=-1).values  # sorted, descending
    floor = candidates[:, :1] + min_p.unsqueeze(1).log()  # log 0 = -inf: off
    in_k = torch.where(top_k < vocab, top_k, vocab).clamp_(min=1)
    threshold, found = _nucleus(candidates, logits, floor, in_k, top_p)
    if width < vocab and not bool(found.all()):
        # Only rows with a flat distribution or a large k are sorted completely.
        rows = torch.nonzero(~found).squeeze(1)
        ordered = logits[rows].sort(dim=-1, descending=True).values
        threshold[rows], _ = _nucleus(ordered, logits[rows], floor[rows], in_k[rows], top_p[rows])
    return threshold


def _nucleus(
    ordered: torch.Tensor,
    logits: torch.Tensor,
    floor: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the threshold [n, 1] by each row's largest entries, and if these sufficed [n]."""
    width, vocab = ordered.shape[1], logits.shape[1]
    kth = ordered.gather(1, (top_k.clamp(max=width) - 1).unsqueeze(1))
    has_kth = top_k <= width
    no_k = top_k >= vocab
    floor = torch.where(has_kth.unsqueeze(1) & ~no_k.unsqueeze(1), torch.maximum(floor, kth), floor)
    best = ordered[:, :1]
    kept = ordered >= floor
    weights = torch.where(kept, (ordered - best).exp(), 0.0)
    mass = weights.cumsum(dim=-1)
    everything = torch.where(logits >= floor, (logits - best).exp(), 0.0).sum(-1, keepdim=True)
    wanted = top_p.unsqueeze(1) * everything
    # Entry i is needed if the entries before it have not reached the share yet.
    needed = (mass - weights < wanted) & kept
    needed[:, 0] = True
    count = needed.sum(dim=-1, keepdim=True)
    off = top_p >= 1.0
    threshold = torch.where(off.unsqueeze(1), floor, ordered.gather(1, count - 1))
    complete = (mass[:, -1:] >= wanted).squeeze(1) | off
    return threshold, complete & (has_kth | no_k)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's fmix32, in place, on int32 that wraps; masks make the shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85EBCA6B
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    return x
