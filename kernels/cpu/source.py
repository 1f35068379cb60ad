"""Places of texts behind a source, by ``native/inputs.cpp``."""

from __future__ import annotations

import torch

from kernels.cpu.bindings import function


def places_behind(values: torch.Tensor, begin: int) -> torch.Tensor:
    """See ``kernels.reference.source``."""
    out = torch.empty_like(values)
    pointers = values.data_ptr(), out.data_ptr()
    function("quire_places_behind")(
        pointers[0], values.itemsize, begin, values.numel(), pointers[1]
    )
    return out
