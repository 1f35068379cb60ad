"""A rank's share of LoRA adapters.

What an adapter adds to ``W x`` is ``B A x``. Where W is cut by outputs, a rank needs some rows of B
and all of A. Where W is cut by inputs it needs some columns of A and all of B, and what it adds is
a summand, as what the layer gives is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.lora.peft import Delta
from engine.parallel.shard import Cut


def own_delta(cuts: Mapping[str, Cut]) -> Callable[[str, Delta], Delta | None]:
    """What a rank keeps of the delta of a parameter; None: the parameter lies in another stage."""

    def own(parameter: str, delta: Delta) -> Delta | None:
        cut = cuts.get(parameter)
        if cut is None:
            return None
        down = delta.down if cut.columns is None else delta.down[:, cut.columns].contiguous()
        runs = [run for run, _ in cut.pieces(None)]
        behind = delta.up.shape[0] - cut.whole.shape[0]
        if behind:  # values that are keys: their rows come once more
            runs.append(slice(runs[-1].start + behind, runs[-1].stop + behind))
        return Delta(down, torch.cat([delta.up[run] for run in runs]))

    return own
