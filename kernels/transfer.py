"""Send small tensors to the device without waiting for it."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on ``device``, without waiting for the device's current work.

    A copy to a GPU from pageable memory returns only after all earlier work; from page-locked
    memory it is queued. torch reuses the page-locked memory after it has been read.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
