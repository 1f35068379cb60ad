"""What is kept of a prompt's chunks, as the engine's memory plan estimates it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from engine.kv_cache.step_memory import _chunk_floats
from engine.models.recurrence import ChannelScanSpec, GatedDeltaSpec, RecurrenceSpec
from kernels.inputs import StepRows
from kernels.recurrent import GatedDeltaShape, max_chunks
from kernels.triton import operations

TOKENS, ROWS = 2048, 256
DELTA = GatedDeltaSpec(8, 8, 96, 128, 4, 1e-5)
BY_CHANNEL = GatedDeltaSpec(8, 8, 96, 128, 4, 1e-5, decays_channels=True)
CHANNELS = ChannelScanSpec(512, 16, 32, 4)
MODULES = ("recurrent", "delta_chunks", "channel_delta_chunks", "channel_scan_chunks")


class Allocations(TorchDispatchMode):
    """Sums the sizes of new tensors."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if str(func).startswith("aten.empty"):
            self.num_bytes += made.nbytes
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [DELTA, BY_CHANNEL, CHANNELS], ids=["delta", "keys", "channels"])
def test_the_estimate_covers_it(
    spec: RecurrenceSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MODULES:
        module = importlib.import_module(f"kernels.triton.{name}")
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    with torch.device("meta"):
        places = [torch.empty(n, dtype=torch.int32) for n in (ROWS, ROWS + 1, ROWS, TOKENS)]
        rows, one = StepRows(*places), torch.empty(1)
        if isinstance(spec, ChannelScanSpec):
            x, shared = torch.empty(TOKENS, 512, dtype=dtype), torch.empty(TOKENS, 16)
            given = x, x, shared, shared, torch.empty(16, 512), one, one, rows
            run, width = operations.channel_scan, 512
        else:
            shape = GatedDeltaShape(8, 8, 96, 128, decays_channels=spec.decays_channels)
            mixed = torch.empty(TOKENS, shape.channels, dtype=dtype)
            given = mixed, torch.empty(TOKENS, 9), one, one, one, rows, shape
            run, width = operations.gated_delta, 8 * 128
        with Allocations() as made:
            run(*given)
    kept = made.num_bytes - TOKENS * width * dtype.itemsize
    told = 4 * _chunk_floats(spec) * max_chunks(TOKENS, ROWS)
    assert told / 2 < kept <= told
