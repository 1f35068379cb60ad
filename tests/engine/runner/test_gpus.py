"""GPUs that torch cannot use, and what is said about them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.runner import device as device_module
from engine.runner import gpus
from engine.runner.device import choose_device, choose_dtype
from engine.runner.load import load_runner

BUILT_FOR = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "compute_100"]


@pytest.fixture(autouse=True)
def _forget_warnings() -> None:
    device_module._warn_of_cpu.cache_clear()
    device_module._warn_of_float16.cache_clear()


def fail_with(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with NVIDIA's driver, on which a torch for CUDA finds no GPU."""
    monkeypatch.setattr(gpus, "_SIGNS", (str(tmp_path),))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    too_old = RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")
    monkeypatch.setattr(torch.cuda, "init", fail_with(too_old))
    return monkeypatch


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.message for r in caplog.records if r.levelno == logging.WARNING)


def test_a_driver_that_is_too_old_is_named(
    driver: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_device("auto").type == "cpu"
    assert "running on the CPU: The NVIDIA driver on your system is too old" in told(caplog)
    with pytest.raises(ModelLoadError, match=r"torch finds no GPU: The NVIDIA driver .* too old"):
        choose_device("cuda")
    caplog.clear()
    assert choose_device("auto").type == "cpu"
    assert choose_device("cpu").type == "cpu"
    assert not told(caplog), "once is enough"


def test_a_torch_for_cpus_beside_a_driver_is_named(
    driver: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.setattr(torch.version, "cuda", None)
    choose_device("auto")
    assert f"this torch ({torch.__version__}) is not built for CUDA" in told(caplog)


def test_gpus_that_are_not_visible_are_told_unless_they_are_hidden_on_purpose(
    driver: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.setattr(torch.cuda, "init", fail_with(RuntimeError("No CUDA GPUs are available")))
    for hidden in ("", "-1"):
        driver.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto").type == "cpu"
    assert not told(caplog)
    driver.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-another-machine")
    choose_device("auto")
    assert "available (CUDA_VISIBLE_DEVICES is 'GPU-of-another-machine')" in told(caplog)
    driver.delenv("CUDA_VISIBLE_DEVICES")
    choose_device("auto")
    assert "--gpus all" in told(caplog)


def test_without_any_sign_of_a_gpu_nothing_is_said(
    driver: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    driver.setattr(gpus, "_SIGNS", (str(tmp_path / "nothing"),))
    assert choose_device("auto").type == "cpu"
    assert not told(caplog)
    with pytest.raises(ModelLoadError, match=r"torch finds no GPU$"):
        choose_device("cuda")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU that torch finds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT_FOR)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    return monkeypatch


def test_a_gpu_that_torch_was_not_built_for_is_named(
    seen: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_device("auto").type == "cpu"
    reason = "GPU 0 (Tesla V100) has compute capability 7.0, and this torch"
    assert reason in told(caplog)
    assert "is built for sm_75, sm_80, sm_86, sm_90a, sm_100, compute_100" in told(caplog)
    with pytest.raises(ModelLoadError, match=r"'cuda' was requested, but GPU 0 \(Tesla V100\)"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        *(((7, 0), False), ((7, 5), True), ((8, 0), True), ((8, 9), True), ((8, 7), True)),
        *(((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), True)),
    ],
)
def test_code_runs_on_newer_gpus_of_a_generation_and_what_is_compiled_there_on_all(
    capability: tuple[int, int], runs: bool, seen: pytest.MonkeyPatch
) -> None:
    seen.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (gpus.unsupported_reason(0) is None) == runs


def test_code_for_one_gpu_does_not_run_on_the_next(seen: pytest.MonkeyPatch) -> None:
    seen.setattr(torch.cuda, "get_arch_list", lambda: ["sm_100a"])
    for capability, runs in (((10, 0), True), ((10, 3), False)):
        seen.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert (gpus.unsupported_reason(0) is None) == runs


def test_a_gpu_that_another_process_has_is_an_error_of_one_line(
    seen: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not a run on the CPU: the next start may succeed."""
    seen.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    busy = torch.AcceleratorError("CUDA error: all CUDA-capable devices are busy\nmore about it")
    seen.setattr(torch, "zeros", fail_with(busy))
    for name in ("auto", "cuda"):
        with pytest.raises(ModelLoadError, match=r"^the GPU cuda:0 cannot be used: .* are busy$"):
            choose_device(name)


def test_processes_that_share_a_machine_do_not_look_at_each_others_gpus(
    seen: pytest.MonkeyPatch,
) -> None:
    seen.setattr(torch.cuda, "device_count", lambda: 1)
    seen.setattr(gpus, "check_works", lambda device: pytest.fail(f"looked at {device}"))
    config = EngineConfig(model="demo/model", num_replicas=2)
    with pytest.raises(ModelLoadError, match="data_parallel_size 2: torch finds 1 GPUs"):
        load_runner(config)


def test_a_gpu_without_bfloat16_computes_in_float16_and_says_so(
    seen: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = torch.device("cuda", 0)
    for checkpoint in ("bfloat16", "torch.bfloat16", None):
        assert choose_dtype("auto", checkpoint, there) == torch.float16
    assert told(caplog).count("Tesla V100 computes in the latter only") == 1
    for checkpoint in ("float32", "float16"):
        assert choose_dtype("auto", checkpoint, there) == getattr(torch, checkpoint)
    assert choose_dtype("bfloat16", "bfloat16", there) == torch.bfloat16, "if asked for"
    seen.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert choose_dtype("auto", "bfloat16", there) == torch.bfloat16
