"""The highest scores of a token are selected, by one program or by several."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import DeviceGeometry
from kernels.triton import selection

BLOCK = 16


def by_sorting(scores: torch.Tensor, table: torch.Tensor, top_k: int) -> list[int]:
    """The slots of a token's highest scores, in the order of positions; the first of equals."""
    numbers = torch.where(scores.isnan(), float("-inf"), scores) + 0.0  # one zero
    order = torch.sort(numbers, descending=True, stable=True).indices
    chosen = order[:top_k].sort().values
    return (table[chosen // BLOCK] * BLOCK + chosen % BLOCK).tolist()


def scores_of(kind: str, count: int, longest: int) -> torch.Tensor:
    torch.manual_seed(longest)
    scores = torch.randn(count, longest)
    if kind == "few numbers":
        return (scores * 2).round() * 0.5
    if kind == "close":
        return 1.0 + scores * 1e-6
    if kind == "broken":
        return torch.where(scores > 1.0, float("nan"), torch.where(scores < -1, -torch.inf, scores))
    return scores * torch.logspace(-20, 20, count).unsqueeze(1)


@pytest.mark.parametrize("kind", ["any", "few numbers", "close", "broken"])
@pytest.mark.parametrize("most", [1, 1000], ids=["a program a token", "several"])
def test_what_is_selected_is_what_sorting_finds(kind, most, monkeypatch):
    """Texts shorter than what is selected, of one run, and of several that do not end with one."""
    monkeypatch.setattr(selection, "MANY_TOKENS", most)
    monkeypatch.setattr(selection, "RUN", 64)
    monkeypatch.setattr(selection, "_TILE", 32)
    lengths, top_k, longest = [200, 7, 24, 25, 64, 65, 193, 0], 24, 210
    scores = scores_of(kind, len(lengths), longest)
    tables = torch.randperm(14 * len(lengths), dtype=torch.int32).view(len(lengths), -1)
    lines = torch.randperm(len(lengths), dtype=torch.int32)
    geometry = DeviceGeometry(
        torch.arange(len(lengths) + 1, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        lines,
        tables,
    )
    slots = torch.full((len(lengths), top_k), -1, dtype=torch.int32)
    selection.select_highest(scores, geometry, slots, BLOCK)
    for token, length in enumerate(lengths):
        expected = by_sorting(scores[token, :length], tables[lines[token]], top_k)
        assert slots[token].tolist() == expected + [-1] * (top_k - len(expected)), length
