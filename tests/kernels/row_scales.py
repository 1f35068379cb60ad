"""What torch's products of float8 can do on a CPU."""

from __future__ import annotations

import torch


def cpu_takes_row_scales() -> bool:
    """Whether each row may have a scale of its own: in 2.11 only on GPUs, where it is used."""
    codes, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.T, scales, scales.T.contiguous(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True
