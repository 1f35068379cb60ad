"""How closely the student matches the teacher on held-out documents."""

from __future__ import annotations

from typing import Any

import torch

from tools.distill import losses, models
from tools.distill.packing import Batch


@torch.no_grad()
def validate(
    teacher: Any, student: Any, batches: list[Batch], device: torch.device
) -> dict[str, float]:
    """Means over the learned tokens.

    kl: between the distributions, at temperature 1, in nats. hard: cross-entropy with the text.
    agreement: share of tokens for which both have the same most likely token.
    """
    totals = {"kl": 0.0, "hard": 0.0, "agreement": 0.0}
    count = 0
    for batch in batches:
        there = batch.to(device)
        rows = (there.inputs, there.positions, there.loss_mask)
        ours, theirs = (models.run(model, *rows).logits.float() for model in (student, teacher))
        number = len(batch.targets)
        totals["kl"] += losses.logit_kl(ours, theirs, 1.0).item() * number
        totals["hard"] += losses.hard_labels(ours, there.targets).item() * number
        totals["agreement"] += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        count += number
    return {name: total / max(1, count) for name, total in totals.items()}
