"""Token masks: a line of bits for each request that may not sample every token.

The lines are on the device beside the counts; each step transfers those that have changed. On a CPU
the host's lines are the ones that kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import Failure
from engine.grammar.backend import (
    BatchMatcher,
    CompiledGrammar,
    GrammarFailed,
    MatcherRow,
)
from engine.sampling.constraint import Constraint
from engine.types import Request

Send = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]


# A row of a step that is about to sample: its slot, the position of its first token in the step,
# and its tokens, none of them pending if the mask depends on the output. A plain tuple, because
# there is one for each row of each step.
MaskedRow = tuple[int, int, Sequence[int]]


class _MaskLine(NamedTuple):
    """A line in use."""

    line: int
    constraint: Constraint
    can_defer: bool  # whether it may be written after the row's logits are known


class MaskUpdate(NamedTuple):
    """The result of updating a step's masks; rows are given by index."""

    failures: dict[int, Failure]  # rows that cannot continue; their masks are meaningless
    deferred: list[int]  # rows whose masks are written by ``write_deferred``


class _BatchRows(NamedTuple):
    """The rows of a step that one batch matcher advances, with their indices among all rows."""

    indices: list[int]
    rows: list[MatcherRow]
    restricted: list[int]  # those with restrictions besides the grammar


class MaskLines:
    """One line for each restricted request.

    Args:
        vocab_size: of the model.
        eos_token_ids: tokens that end a text.
        device: of the kernels.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._host = np.zeros((0, -(-vocab_size // 32)), np.int32)
        self._device = device
        self.lines = torch.from_numpy(self._host).to(device)  # [lines, ceil(vocab / 32)] int32
        self._lines_by_slot: dict[int, _MaskLine] = {}  # by row slot
        self._fresh: set[int] = set()  # slots with a fixed mask that has not been written yet
        self._free: list[int] = []

    def __len__(self) -> int:
        """Lines in use."""
        return len(self._lines_by_slot)

    def allocate(
        self,
        slot: int,
        request: Request,
        output_ids: Sequence[int],
        grammar: CompiledGrammar | None,
    ) -> int:
        """Allocate a line for a row with this output so far."""
        line = self._free.pop() if self._free else self._new_line()
        constraint = Constraint(request, output_ids, grammar, self._eos, self._vocab_size)
        may_wait = constraint.can_defer and self.can_defer
        self._lines_by_slot[slot] = _MaskLine(line, constraint, may_wait)
        if constraint.is_fixed:
            self._fresh.add(slot)
        return line

    def free(self, slot: int) -> None:
        """Free the line of a row, if it has one."""
        taken = self._lines_by_slot.pop(slot, None)
        if taken is not None:
            self._fresh.discard(slot)
            self._free.append(taken.line)

    def timestamp_begin(self, slot: int) -> int | None:
        """Return the first timestamp that a row may have to prefer; see ``prefer_timestamps``."""
        return self._lines_by_slot[slot].constraint.timestamp_begin

    @property
    def can_defer(self) -> bool:
        """Whether masks can be written after the logits, which must be on the host for that.

        Read when a row is added.
        """
        return self._device.type == "cpu"

    def update(self, rows: Sequence[MaskedRow], send: Send) -> MaskUpdate:
        """Write the masks of these rows, except those that wait, and send them to the device.

        Args:
            rows: rows of a step, each with a line.
            send: transfers int32 arrays to the device.
        """
        failures: dict[int, Failure] = {}
        waiting: list[int] = []
        written: list[int] = []
        batches: dict[BatchMatcher, _BatchRows] = {}
        for index, (slot, start, token_ids) in enumerate(rows):
            line, constraint, may_wait = self._lines_by_slot[slot]
            if constraint.is_fixed:
                if slot not in self._fresh:
                    continue
                self._fresh.discard(slot)
            written.append(line)
            matcher, batch_matcher = constraint.matcher, constraint.batch_matcher
            if matcher is not None and batch_matcher is not None:
                batch = batches.get(batch_matcher)
                if batch is None:
                    batch = batches[batch_matcher] = _BatchRows([], [], [])
                if constraint.has_other_restrictions:
                    batch.restricted.append(len(batch.rows))
                batch.indices.append(index)
                batch.rows.append(
                    (matcher, constraint.advance_unseen(start, token_ids), line, may_wait)
                )
                continue
            if constraint.depends_on_output:
                constraint.advance(start, token_ids)
            try:
                constraint.write(self._host[line], _num_output(rows[index], constraint))
            except GrammarFailed as error:
                self._fail(line, index, error, failures)
        for batch_matcher, batch in batches.items():
            waiting += self._advance_batch(batch_matcher, batch, rows, failures)
        if written and self._device.type != "cpu":
            at, lines = send((np.array(written, np.int32), self._host[written]))
            self.lines.index_copy_(0, at.long(), lines)
        return MaskUpdate(failures, waiting)

    def write_deferred(
        self, rows: Sequence[MaskedRow], candidates: Sequence[Sequence[int]]
    ) -> dict[int, Failure]:
        """Write the masks of rows that have waited for their logits.

        Args:
            rows: the rows.
            candidates: for each, the tokens it would sample without a mask, in order; negative
                values are padding.

        Returns:
            Failures of rows that cannot continue, by index in ``rows``.
        """
        failures: dict[int, Failure] = {}
        for index, (row, choices) in enumerate(zip(rows, candidates, strict=True)):
            line, constraint, _ = self._lines_by_slot[row[0]]
            some = [token_id for token_id in choices if token_id >= 0]
            try:
                constraint.write_deferred(self._host[line], _num_output(row, constraint), some)
            except GrammarFailed as error:
                self._fail(line, index, error, failures)
        return failures

    def draft_masks(
        self, rows: Sequence[MaskedRow], drafts: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, dict[int, Failure]]:
        """The masks of these rows, each followed by one for after each of its drafts.

        They apply to one step only: the rows' own lines are not changed.

        Args:
            rows: rows of a step, each with a line.
            drafts: the drafts of each row.

        Returns:
            [len(rows) + number of drafts, ceil(vocab / 32)] int32, and failures of rows that cannot
            continue, by index.
        """
        failures: dict[int, Failure] = {}
        count = len(rows) + sum(map(len, drafts))
        all_lines = np.empty((count, self._host.shape[1]), np.int32)
        begin = 0
        for index, (row, ahead) in enumerate(zip(rows, drafts, strict=True)):
            slot, start, token_ids = row
            constraint = self._lines_by_slot[slot].constraint
            lines = all_lines[begin : begin + len(ahead) + 1]
            begin += len(lines)
            try:
                if constraint.depends_on_output:
                    constraint.advance(start, token_ids)
                constraint.write_ahead(lines, _num_output(row, constraint), ahead)
            except GrammarFailed as error:
                failures[index] = _failure(error)
        return all_lines, failures

    def _advance_batch(
        self,
        batch_matcher: BatchMatcher,
        batch: _BatchRows,
        rows: Sequence[MaskedRow],
        failures: dict[int, Failure],
    ) -> list[int]:
        """Write the masks of a batch of rows in one call; returns the rows that wait."""
        step = batch_matcher.advance_and_fill(batch.rows, self._host)
        for place, error in step.failures.items():
            self._fail(batch.rows[place][2], batch.indices[place], error, failures)
        for place in batch.restricted:
            if place not in step.failures and place not in step.deferred:
                row = rows[batch.indices[place]]
                line, constraint, _ = self._lines_by_slot[row[0]]
                constraint.apply_restrictions(self._host[line], _num_output(row, constraint))
        return [batch.indices[place] for place in step.deferred]

    def _fail(
        self, line: int, index: int, error: GrammarFailed, failures: dict[int, Failure]
    ) -> None:
        failures[index] = _failure(error)
        self._host[line] = -1

    def _new_line(self) -> int:
        """Allocate a line after doubling their number."""
        old = self._host.shape[0]
        added = max(4, old)
        self._host = np.concatenate((self._host, np.zeros((added, self._host.shape[1]), np.int32)))
        if self._device.type == "cpu":
            self.lines = torch.from_numpy(self._host)
        else:
            more = self.lines.new_zeros(added, self.lines.shape[1])
            self.lines = torch.cat((self.lines, more))
        self._free.extend(range(old + added - 1, old, -1))
        return old


def _num_output(row: MaskedRow, constraint: Constraint) -> int:
    """The index of the output token that a row is about to sample."""
    _, start, token_ids = row
    return start + len(token_ids) - constraint.num_prompt


def _failure(error: GrammarFailed) -> Failure:
    return Failure(
        kind="InvalidParameter", message=str(error), param="grammar", code="grammar_timeout"
    )
