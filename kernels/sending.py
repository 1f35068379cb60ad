"""Small tensors on their way to the device, while it is at work."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``, without waiting for what the device is at.

    From ordinary memory a copy to a GPU ends when all work before it has; from page-locked memory
    it is one more piece of work. The library gives that memory to others once it has been read.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
