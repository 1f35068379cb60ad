"""Cases of LoRA adapters, compared with the reference."""

from __future__ import annotations

import numpy as np
import torch

from kernels.bench.case import Case
from kernels.lora import AdapterWeights, adapter_rows
from kernels.reference import lora
from kernels.triton import lora as triton_lora

_LAYERS = 8  # in sequence: what one leaves to wait for is part of the next one's time


def adapter_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    adapters: int,
    rank: int,
    inputs: int,
    outputs: int,
) -> Case:
    """Several layers' adapters; the floor reads each adapter once."""
    x = torch.randn(tokens, inputs, dtype=dtype, device=device)
    nothing = torch.zeros(0, dtype=torch.int32)
    layers = [
        AdapterWeights(
            torch.randn(adapters, rank, inputs, dtype=dtype, device=device) / inputs**0.5,
            torch.randn(adapters, rank, outputs, dtype=dtype, device=device) / rank**0.5,
            nothing,
        )
        for _ in range(_LAYERS)
    ]
    rows = adapter_rows(np.arange(tokens, dtype=np.int64) % adapters, adapters, device)
    planned = triton_lora.plan_adapters(rows, adapters)

    def ours() -> torch.Tensor:
        out = torch.zeros(tokens, outputs, dtype=dtype, device=device)
        for weights in layers:
            triton_lora.add_adapters(out, x, weights, planned)
        return out

    def theirs() -> torch.Tensor:
        out = torch.zeros(tokens, outputs, dtype=dtype, device=device)
        for weights in layers:
            lora.add_adapters(out, x, weights, rows)
        return out

    read = min(adapters, tokens) * rank * (inputs + outputs) + x.numel() + 2 * tokens * outputs
    return Case(
        name,
        run=ours,
        peers={"torch": theirs},
        bytes_moved=_LAYERS * read * dtype.itemsize,
        flops=2.0 * _LAYERS * tokens * rank * (inputs + outputs),
        is_latency_bound=tokens <= 64,
    )
