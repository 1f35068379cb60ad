"""Places of texts behind a source in plain torch (``kernels/source.py``)."""

from __future__ import annotations

import torch


def places_behind(values: torch.Tensor, begin: int) -> torch.Tensor:
    """Count places, or lengths, from ``begin`` on instead of from 0.

    Args:
        values: [n] int32 or int64. What lies before ``begin``, as padding does, becomes 0.
        begin: the place that becomes 0.

    Returns:
        [n] of the same type.
    """
    return (values - begin).clamp(min=0)
