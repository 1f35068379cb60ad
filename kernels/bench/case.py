"""What a benchmark case is, and what it is measured by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches at its best, measured."""

    bytes_per_s: float  # device to device, bytes read and written
    flops_per_s: float  # a large bf16 matrix product on random data


@dataclass(frozen=True)
class Case:
    """One kernel on one shape, and what else computes the same."""

    name: str
    run: Callable[[], torch.Tensor]
    peers: dict[str, Callable[[], torch.Tensor]]
    bytes_moved: float  # fewest: each input read once, each output written once
    flops: float = 0.0
    tolerance: float = 2e-2  # of the relative error against a peer; 0: the same elements
    is_latency_bound: bool = False  # too small to have a share of any ceiling
    peers_wait: bool = False  # for the device in their midst: they cannot be captured

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time at these ceilings."""
        return max(self.bytes_moved / bytes_per_s, self.flops / flops_per_s)

    def error(self) -> float:
        """The largest relative error against a peer; nan never passes."""
        actual = self.run().double()
        worst = 0.0
        for peer in self.peers.values():
            expected = peer().double()
            if self.tolerance == 0.0:
                worst = max(worst, float((actual != expected).double().mean()))
                continue
            difference = float((actual - expected).norm() / expected.norm())
            worst = difference if difference != difference else max(worst, difference)
        return worst


class TwinCase(NamedTuple):
    """The same work by the CPU's kernels and by their twins."""

    name: str
    run: Callable[[], torch.Tensor]
    twin: Callable[[], torch.Tensor]
    bytes_moved: float  # fewest
    flops: float = 0.0
