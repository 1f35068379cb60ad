"""A rank's shard of LoRA adapters.

An adapter adds ``B A x`` to ``W x``. If W is cut by outputs, a rank needs some rows of B and all of
A. If W is cut by inputs, it needs some columns of A and all of B, and its delta is a partial sum,
as is the layer's own result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.lora.peft import Delta
from engine.parallel.shard import ParameterSlice


def local_delta(cuts: Mapping[str, ParameterSlice]) -> Callable[[str, Delta], Delta | None]:
    """Return a rank's part of a parameter's delta; None if the parameter is in another stage."""

    def own(parameter: str, delta: Delta) -> Delta | None:
        cut = cuts.get(parameter)
        if cut is None:
            return None
        down = delta.down if cut.columns is None else delta.down[:, cut.columns].contiguous()
        runs = [run for run, _ in cut.row_ranges(None)]
        behind = delta.up.shape[0] - cut.full.shape[0]
        if behind:  # values are keys: their rows are repeated
            runs.append(slice(runs[-1].start + behind, runs[-1].stop + behind))
        return Delta(down, torch.cat([delta.up[run] for run in runs]))

    return own
