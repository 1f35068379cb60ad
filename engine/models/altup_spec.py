"""Several residual streams, as data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AltUpSpec:
    """Alternating updates (Baykal et al. 2023), with LAuReL (Menghani et al. 2024).

    Each layer reads one of several residual streams, and corrects all of them by what it made of
    that one.
    """

    num_streams: int
    active: int  # the number of the stream that layers read
    laurel_rank: int
    scales_corrected: bool  # the corrected stream is scaled before it meets per-layer embeddings
