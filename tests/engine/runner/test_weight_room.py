"""Weights that do not fit into the memory of a CPU are refused before they are read."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.parallel_reader import ParallelReader
from engine.paths import default_model_dir
from engine.runner import weight_room
from engine.runner.load import load_runner

MIB = 2**20


def load(monkeypatch: pytest.MonkeyPatch, *, free: int, swap: int = 0, **fields) -> None:
    monkeypatch.setattr(weight_room, "free_host_bytes", lambda: free)
    monkeypatch.setattr(weight_room, "free_swap_bytes", lambda: swap)
    load_runner(EngineConfig(model=str(default_model_dir()), device="cpu", **fields))


def test_weights_larger_than_the_free_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ParallelReader, "fill", lambda *_: pytest.fail("something was read"))
        with pytest.raises(ModelLoadError, match=r"the weights take [\d,]+ MiB in float32, 1 MiB"):
            load(patch, free=MIB, dtype="float32")
    load(monkeypatch, free=MIB, swap=1000 * MIB, dtype="float32")
    load(monkeypatch, free=1000 * MIB, dtype="float32")


def test_weights_whose_size_is_not_known_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, free=MIB, quantization="int8")
