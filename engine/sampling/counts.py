"""Token counts of requests with penalties, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.sampling import TokenCounts
from kernels.transfer import to_device


class CountLines:
    """One vocabulary-wide line of counts for each request with penalties.

    Lines are allocated when first needed, and reused. A step counts the tokens it samples itself
    (``Operations.feed_back``), so a line is written here only when its row is added.
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

    def allocate(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        """Allocate a line for a row, and count its tokens so far."""
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

    def free(self, slot: int) -> None:
        """Free the line of a row, if it has one."""
        line = self._lines.pop(slot, None)
        if line is not None:
            self._free.append(line)

    def _new_line(self) -> int:
        """Allocate a line after doubling their number."""
        old = self.counts.output.shape[0]
        added = max(4, old)
        self.counts = TokenCounts(*(_with_lines(table, added) for table in self.counts))
        self._free.extend(range(old + added - 1, old, -1))
        return old


def _with_lines(table: torch.Tensor, added: int) -> torch.Tensor:
    return torch.cat((table, table.new_zeros(added, table.shape[1])))
