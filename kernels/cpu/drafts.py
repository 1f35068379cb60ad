"""Drafts: feeding guesses to the next pass, and accepting them, by ``native/drafts.cpp``."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import function, pointer


def accept_drafts(
    newest: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    is_kept: torch.Tensor,
    sizes: torch.Tensor,
) -> torch.Tensor:
    """See ``kernels.reference.drafts``."""
    accepted = torch.empty(sizes.numel(), dtype=torch.int64)
    function("quire_accept_drafts")(
        is_kept.data_ptr(),
        token_ids.data_ptr(),
        sizes.data_ptr(),
        sizes.numel(),
        slots.data_ptr(),
        newest.data_ptr(),
        accepted.data_ptr(),
    )
    return accepted


def advance_draft_pass(
    packed: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    draft_ids: torch.Tensor,
    target: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Store the tokens sampled by one pass of a draft model, and make them the next pass's input.

    Args:
        packed: [3 * n] int32, slots, starts and tokens of the pass.
        token_ids: [n] int64, the tokens it sampled.
        rows: [m] int32, the rows whose tokens are used; if ``target`` is ``packed``, all in order.
        draft_ids: [m] int64; receives these tokens.
        target: [3 * k] int32, receives the next pass of the first k of them. None: there is none.
        positions: [k] int64, receives the positions of the tokens that it will sample.
    """
    function("quire_pass_on")(
        packed.data_ptr(),
        packed.numel() // 3,
        token_ids.data_ptr(),
        rows.data_ptr(),
        rows.numel(),
        draft_ids.data_ptr(),
        0 if target is None else target.numel() // 3,
        pointer(target),
        pointer(positions),
    )
