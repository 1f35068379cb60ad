"""What penalised requests have in their text, counted on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.sampling import TokenCounts
from kernels.sending import to_device


class CountLines:
    """One vocabulary-wide line for each request with penalties; the others have none.

    Lines are made when first needed and used again. A step counts what it samples by itself
    (``Operations.feed_back``), so a line is only written here when its row comes.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = TokenCounts(
            output=torch.zeros(0, vocab_size, dtype=torch.int32, device=device),
            prompt=torch.zeros(0, vocab_size, dtype=torch.bool, device=device),
        )
        self._lines: dict[int, int] = {}  # row slot -> line
        self._free: list[int] = []

    def __len__(self) -> int:
        """Lines in use."""
        return len(self._lines)

    def take(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        """A line for a row, with its tokens so far counted."""
        line = self._lines[slot] = self._free.pop() if self._free else self._new_line()
        output, prompt = self.counts.output[line], self.counts.prompt[line]
        device = output.device
        prompt.zero_()
        prompt.index_fill_(0, to_device(torch.tensor(prompt_ids), device), True)
        output.zero_()
        if output_ids:
            ids = to_device(torch.tensor(output_ids), device)
            output.index_put_((ids,), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
        return line

    def give_back(self, slot: int) -> None:
        """Take a row's line back, where it has one."""
        line = self._lines.pop(slot, None)
        if line is not None:
            self._free.append(line)

    def _new_line(self) -> int:
        """Double the lines when all are used."""
        old = self.counts.output.shape[0]
        added = max(4, old)
        self.counts = TokenCounts(*(_with_lines(table, added) for table in self.counts))
        self._free.extend(range(old + added - 1, old, -1))
        return old


def _with_lines(table: torch.Tensor, added: int) -> torch.Tensor:
    return torch.cat((table, table.new_zeros(added, table.shape[1])))
