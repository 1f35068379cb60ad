"""Benchmark cases, and the machine limits they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Ceilings:
    """A machine's measured peak rates."""

    bytes_per_s: float  # device to device, bytes read and written
    flops_per_s: float  # a large bf16 matrix product on random data


@dataclass(frozen=True)
class Case:
    """One kernel on one shape, and its peers, which compute the same."""

    name: str
    run: Callable[[], torch.Tensor]
    peers: dict[str, Callable[[], torch.Tensor]]
    bytes_moved: float  # minimum: each input read once, each output written once
    flops: float = 0.0
    tolerance: float = 2e-2  # relative error against a peer; 0: identical elements
    is_latency_bound: bool = False  # too small for a meaningful share of a limit
    peers_synchronise: bool = False  # peers synchronise with the device and cannot be captured

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the least possible time at these rates."""
        return max(self.bytes_moved / bytes_per_s, self.flops / flops_per_s)

    def error(self) -> float:
        """Return the largest relative error against a peer; nan never passes."""
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


class ReferenceCase(NamedTuple):
    """The same work by the CPU's kernels and by the reference."""

    name: str
    run: Callable[[], torch.Tensor]
    reference: Callable[[], torch.Tensor]
    bytes_moved: float  # minimum
    flops: float = 0.0
