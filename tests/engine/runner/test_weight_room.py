"""Weights that do not fit into memory are refused before they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.memory import DeviceMemory
from engine.models.checkpoint import read_config
from engine.models.parallel_reader import ParallelReader
from engine.paths import default_model_dir
from engine.runner import load as load_module
from engine.runner import weight_room
from engine.runner.load import load_runner
from engine.runner.load_plan import make_plan

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


def test_weights_larger_than_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for what others have there: some of it may be freed, or be cached files."""
    config = EngineConfig(model=str(default_model_dir()), device="cpu", dtype="bfloat16")
    model = read_config(config.model)
    plan = make_plan(config, model, model.spec)
    plan = replace(plan, attention=replace(plan.attention, device=torch.device("cuda", 0)))
    for total, is_refused in ((MIB, True), (1000 * MIB, False)):
        memory = DeviceMemory(used_bytes=total, total_bytes=total)
        monkeypatch.setattr(weight_room, "device_memory", lambda _, found=memory: found)
        if is_refused:
            told = r"the weights take 7 MiB in bfloat16, the GPU cuda:0 has 1 MiB; --quantization"
            with pytest.raises(ModelLoadError, match=told):
                weight_room.check_weights_fit(plan)
        else:
            weight_room.check_weights_fit(plan)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError, "the GPU's memory does not suffice: CUDA out of memory."),
        (torch.AcceleratorError, "the GPU failed while it was loaded: CUDA out of memory."),
    ],
)
def test_a_gpus_error_while_a_model_is_loaded_is_told_in_one_line(
    error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error("CUDA out of memory.\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(load_module, "RowTable", fail)
    with pytest.raises(ModelLoadError) as raised:
        load_runner(EngineConfig(model=str(default_model_dir()), device="cpu"))
    assert str(raised.value) == f"{default_model_dir()}: {told}"
