"""Presence, frequency and repetition penalties, from counts kept for the rows that need them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class TokenCounts:
    """What penalised rows have in their prompt and output, one vocabulary-wide line a row.

    Lines are made when first needed and used again; rows without penalties have none.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._lines: dict[int, int] = {}  # row slot -> line
        self._free: list[int] = []

    def set(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Count a row's tokens from the beginning."""
        line = self._lines.get(slot)
        if line is None:
            line = self._lines[slot] = self._free.pop() if self._free else self._new_line()
        self._prompt[line].zero_()
        self._prompt[line, torch.tensor(prompt_ids, device=self._device)] = True
        self._output[line].zero_()
        if output_ids:
            ids = torch.tensor(output_ids, device=self._device)
            ones = torch.ones_like(ids, dtype=torch.int32)
            self._output[line].index_put_((ids,), ones, accumulate=True)

    def clear(self, slot: int) -> None:
        """Give a row's line back, where it has one."""
        line = self._lines.pop(slot, None)
        if line is not None:
            self._free.append(line)

    def add(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Count one more output token of each of these rows (a row may come several times)."""
        lines = torch.tensor([self._lines[slot] for slot in slots], device=self._device)
        ids = torch.tensor(token_ids, device=self._device)
        ones = torch.ones_like(ids, dtype=torch.int32)
        self._output.index_put_((lines, ids), ones, accumulate=True)

    def penalise(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [n, vocab] with the penalties of rows that have lines.

        Presence and frequency (OpenAI) are subtracted for tokens of the output; repetition
        (CTRL, Keskar et al. 2019) divides positive and multiplies negative logits of tokens
        in the prompt or the output.

        Args:
            logits: [n, vocab] float32.
            slots: [n] their rows.
            presence, frequency, repetition: [n, 1] float32.
        """
        lines = torch.tensor([self._lines[int(slot)] for slot in slots], device=self._device)
        counts = self._output.index_select(0, lines)
        in_output = counts > 0
        seen = in_output | self._prompt.index_select(0, lines)
        factor = torch.where(seen, repetition, 1.0)
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        return logits.sub_(counts * frequency).sub_(in_output * presence)

    def _new_line(self) -> int:
        """Double the lines when all are used."""
        old = self._output.shape[0]
        added = max(4, old)
        self._output = _with_lines(self._output, added)
        self._prompt = _with_lines(self._prompt, added)
        self._free.extend(range(old + added - 1, old, -1))
        return old


def _with_lines(table: torch.Tensor, added: int) -> torch.Tensor:
    return torch.cat((table, table.new_zeros(added, table.shape[1])))
