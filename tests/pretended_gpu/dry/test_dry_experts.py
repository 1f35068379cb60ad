"""Experts in codes that are widened in memory, slice by slice."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import ExpertTensors
from kernels.packed import PackedParts
from kernels.reference.moe import fused_moe as reference_moe
from kernels.reference.quantised import quantise_mxfp4
from kernels.tiled import TiledWeight, tile_experts
from kernels.triton import grouped, widening
from kernels.triton.moe import fused_moe
from tests.pretended_gpu.dry.test_dry_rules import captured
from tests.pretended_gpu.stand_in import pretended_gpu
from tests.pretended_gpu.tensor import DEVICE

_EXPERTS, _HIDDEN, _INNER, _TOKENS = 3, 64, 32, 20


def _stacks(device: torch.device) -> tuple[TiledWeight, TiledWeight]:
    random = torch.Generator().manual_seed(1)
    shapes = (_EXPERTS * 2 * _INNER, _HIDDEN), (_EXPERTS * _HIDDEN, _INNER)
    parts = [quantise_mxfp4(torch.randn(shape, generator=random) / 8) for shape in shapes]
    first, second = (tile_experts(PackedParts((part.to(device),)), _EXPERTS) for part in parts)
    return first, second


def test_a_graph_of_widened_experts_serves_any_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for nothing, and no program reads what another slice has left."""
    monkeypatch.setattr(grouped, "MAX_PACKED_TILE_ROWS", 0)
    monkeypatch.setattr(widening, "_TILES", 1)
    monkeypatch.setattr(widening, "MAX_WIDENED_BYTES", 4 * 2 * _INNER * _HIDDEN)
    x, shares = torch.randn(_TOKENS, _HIDDEN), torch.rand(_TOKENS, 2)
    expected = ExpertTensors(*_stacks(torch.device("cpu")))
    with pretended_gpu() as (gpu, _):
        experts = ExpertTensors(*_stacks(DEVICE))
        chosen = torch.zeros(_TOKENS, 2, dtype=torch.int64, device=DEVICE)
        there = x.to(DEVICE), shares.to(DEVICE)
        made: list[torch.Tensor] = []
        graph = captured(lambda: made.append(fused_moe(there[0], experts, chosen, there[1])))
        for pair in ([0, 2], [2, 1]):
            ids = torch.tensor([pair] * _TOKENS)
            chosen.copy_(ids)
            with gpu.step():
                graph.replay()
            wanted = reference_moe(x, expected, ids, shares)
            torch.testing.assert_close(made[0].cpu(), wanted, rtol=1e-4, atol=1e-4)
