"""A whole sampling step in plain torch, with parameters by slot: the reference of the Triton
kernels.

raw logits ─► bias, bans ─► penalties ─► grammar ─► arg-max
                                              └───► temperature ─► truncation ─► draw
"""

from __future__ import annotations

import torch

from kernels.reference.sampling import add_gumbel_noise, argmax, sample_gumbel, truncation_threshold
from kernels.sampling import LogitBias, SamplerOutput, SamplingTable, TokenCounts

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64, which wraps like uint64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None = None,
    bias: LogitBias | None = None,
    masks: torch.Tensor | None = None,
    out: SamplerOutput | None = None,
) -> SamplerOutput:
    """Sample a token for each row; a row's result depends on that row alone.

    Args:
        logits: [n, vocab] contiguous; overwritten if they are float32, but not if narrower.
        slots: [n] int32, the rows' slots in the table.
        positions: [n] int64, of the tokens to be sampled.
        table: the requests' parameters.
        counts: for the requests with penalties; None: there are none.
        bias: for the requests with bias or bans; None: there are none.
        masks: [lines, ceil(vocab / 32)] int32, bit ``i % 32`` of word ``i // 32`` set if token i is
            allowed; None: there are none.
        out: memory for the result; None: it is allocated.
    """
    logits, slots = logits.float(), slots.long()
    token_ids, is_finite = _adjust(logits, slots, positions, table, counts, bias, masks)
    drawn = torch.nonzero((table.temperature[slots] > 0) & is_finite).squeeze(1)
    if drawn.numel():
        rows = _truncate(logits[drawn], slots[drawn], table)
        keys = position_keys(table.seed[slots[drawn]], positions[drawn])
        token_ids[drawn] = sample_gumbel(rows, keys)
    if out is None:
        return SamplerOutput(token_ids, is_finite)
    out.token_ids.copy_(token_ids)
    out.is_finite.copy_(is_finite)
    return out


def candidates(
    logits: torch.Tensor,
    at: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    count: int,
    counts: TokenCounts | None = None,
    bias: LogitBias | None = None,
) -> torch.Tensor:
    """Return what some rows would sample without a mask, then with that token forbidden, and so on.

    Noise depends only on the token, so the first candidate that a mask allows is what ``sample``
    would sample under it. This does not hold with top_k, top_p or min_p, which depend on the mask;
    they are ignored here.

    Args:
        logits: [n, vocab] float32 contiguous; not modified.
        at: [m] int64, the rows in question.
        slots, positions: [m] of these rows; see ``sample``, also for the other arguments.
        count: candidates per row.

    Returns:
        [m, count] int64; -1 if no more are left, and throughout for broken logits.
    """
    slots = slots.long()
    rows = logits[at]
    _, is_finite = _adjust(rows, slots, positions, table, counts, bias, None)
    temperature = table.temperature[slots]
    drawn = torch.nonzero((temperature > 0) & is_finite).squeeze(1)
    if drawn.numel():
        keys = position_keys(table.seed[slots[drawn]], positions[drawn])
        rows[drawn] = add_gumbel_noise(rows[drawn] / temperature[drawn].unsqueeze(1), keys)
    scores, token_ids = rows.sort(dim=-1, descending=True, stable=True)
    is_some = is_finite.unsqueeze(1) & (scores > float("-inf"))
    chosen = torch.full((at.numel(), count), -1, device=logits.device)
    width = min(count, logits.shape[1])
    chosen[:, :width] = torch.where(is_some, token_ids, -1)[:, :width]
    return chosen


def distribution(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None = None,
    bias: LogitBias | None = None,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the distribution that ``sample`` samples from: [n, vocab] float32; one-hot for greedy
    rows.

    Takes the same arguments as ``sample``. Rows that it reports as not finite are meaningless.
    """
    slots = slots.long()
    token_ids, _ = _adjust(logits, slots, positions, table, counts, bias, masks)
    is_greedy = table.temperature[slots] <= 0
    sampled = torch.nonzero(~is_greedy).squeeze(1)
    shares = torch.zeros_like(logits).scatter_(1, token_ids.unsqueeze(1), 1.0)
    if sampled.numel():
        shares[sampled] = _truncate(logits[sampled], slots[sampled], table).softmax(dim=-1)
    return shares


def _adjust(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None,
    bias: LogitBias | None,
    masks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply bias, penalties and masks in place; return the likeliest tokens, and whether rows
    are finite, over the temperature as well: where that overflows, unlike scores become equal."""
    if bias is not None:
        _add_bias(logits, slots, positions, table, bias)
    if counts is not None:
        _apply_penalties(logits, slots, table, counts)
    if masks is not None:
        _apply_mask(logits, table.mask_line[slots], masks)
    token_ids = argmax(logits)
    best, temperature = (
        logits.gather(1, token_ids.unsqueeze(1)).squeeze(1),
        table.temperature[slots],
    )
    return token_ids, torch.where(temperature > 0, best / temperature, best).isfinite()


def _truncate(logits: torch.Tensor, slots: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    """Return logits over temperature, with -inf where min_p, top_k or top_p drop the token."""
    rows = logits / table.temperature[slots].unsqueeze(1)
    top_k = table.top_k[slots].long()
    top_k = torch.where(top_k > 0, top_k, logits.shape[1])
    threshold = truncation_threshold(rows, top_k, table.top_p[slots], table.min_p[slots])
    return rows.masked_fill_(rows < threshold, float("-inf"))


def position_keys(seeds: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Return two 32-bit keys for each (seed, position), by splitmix64 (Steele et al. 2014).

    Args:
        seeds, positions: [n] int64.
        stream: 0 for sampling tokens; all streams are independent of each other.

    Returns:
        [n, 2] int32.
    """
    # Streams are offset beyond all positions.
    mixed = _mix(seeds + _GOLDEN) + (positions + (stream << 40)) * _GOLDEN
    return _mix(mixed).view(torch.int32).view(-1, 2)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; masks make the shifts logical."""
    z = (z ^ (z >> 30 & 2**34 - 1)) * _MIX_1
    z = (z ^ (z >> 27 & 2**37 - 1)) * _MIX_2
    return z ^ (z >> 31 & 2**33 - 1)


def _add_bias(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    bias: LogitBias,
) -> None:
    for row, slot in enumerate(slots.tolist()):
        entries = slice(int(table.bias_begin[slot]), int(table.bias_end[slot]))
        values = torch.where(positions[row] < bias.until[entries], bias.values[entries], 0.0)
        logits[row].index_add_(0, bias.token_ids[entries].long(), values)


def _apply_penalties(
    logits: torch.Tensor, slots: torch.Tensor, table: SamplingTable, counts: TokenCounts
) -> None:
    """Presence and frequency as OpenAI defines them, repetition as CTRL (Keskar et al. 2019)."""
    rows = torch.nonzero(table.count_line[slots] >= 0).squeeze(1)
    at = slots[rows]
    lines = table.count_line[at].long()
    output = counts.output[lines]
    factor = torch.where(
        (output > 0) | counts.prompt[lines], table.repetition[at].unsqueeze(1), 1.0
    )
    penalised = logits[rows]
    penalised = torch.where(penalised > 0, penalised / factor, penalised * factor)
    penalised -= output * table.frequency[at].unsqueeze(1)
    logits[rows] = penalised - (output > 0) * table.presence[at].unsqueeze(1)


def _apply_mask(logits: torch.Tensor, lines: torch.Tensor, masks: torch.Tensor) -> None:
    rows = torch.nonzero(lines >= 0).squeeze(1)
    words = masks[lines[rows].long()]
    bits = words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
