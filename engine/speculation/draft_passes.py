"""What drafting passes yield, and the rows that their drafts fill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from engine.plan_rows import PlanRows
from engine.runner.drafts import DraftTokens
from engine.runner.transfer import Downloads, PendingDownload
from engine.speculation.read_blocks import ReadState
from kernels.transfer import to_device


class DraftPass(NamedTuple):
    """One more draft for some rows, of which those that want the most come first."""

    token_ids: torch.Tensor  # [n] int64
    draft_probs: torch.Tensor | None  # [n, vocab], the distributions they were drawn from
    states: torch.Tensor | None = None  # [n, hidden_size], a head's states before


def fill_rows(
    rows: PlanRows,
    reads: list[ReadState],
    wanting: list[int],
    passes: list[DraftPass],
    downloads: Downloads,
    *,
    keeps_read: bool,
) -> tuple[PlanRows, DraftTokens]:
    """Assemble the rows and their drafts.

    Args:
        rows: the step's, with ``DRAFT_TOKEN``.
        reads: what has been read of those that want drafts.
        wanting: their places among the rows; those that want the most come first.
        passes: their drafts.
        downloads: from the drafts' device.
        keeps_read: all drafts of a row but the last have been read for good.
    """
    firsts = np.cumsum([0, *(draft_pass.token_ids.numel() for draft_pass in passes)]).tolist()
    of_row: dict[int, list[int]] = {}  # each row's drafts, as indices into all of them
    for nth, index in enumerate(wanting):
        of_row[index] = [firsts[depth] + nth for depth in range(rows.num_drafts[index])]
    order = [at for index in sorted(of_row) for at in of_row[index]]
    token_ids = torch.cat([draft_pass.token_ids for draft_pass in passes])
    proposed: torch.Tensor | None = None
    if passes[0].draft_probs is not None:
        proposed = torch.cat([each.draft_probs for each in passes if each.draft_probs is not None])
        proposed = _in_order(proposed, order)
    ordered: torch.Tensor | None = None
    if token_ids.device.type == "cpu":
        told, filled = token_ids.tolist(), PlanRows.of(rows)
        for index, read in zip(wanting, reads, strict=True):
            drafts = tuple(told[at] for at in of_row[index])
            read.read_drafts = drafts[:-1] if keeps_read else ()
            filled.token_ids[index] = rows.token_ids[index][: -len(drafts)] + drafts
        rows = filled
    else:
        ordered = _in_order(token_ids, order)
        if keeps_read:
            fetched = downloads.fetch([token_ids])
            for index, read in zip(wanting, reads, strict=True):
                read.read_drafts = _fetched_drafts(fetched, of_row[index][:-1])
    return rows, DraftTokens(ordered, proposed)


def _in_order(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    return values[to_device(torch.tensor(order), values.device)]


def _fetched_drafts(fetched: PendingDownload, places: list[int]) -> Iterator[int]:
    """Yield some drafts once requested; they are there when their verifying step has finished."""
    fetched_ids = fetched.wait()[0].tolist()
    for place in places:
        yield fetched_ids[place]
