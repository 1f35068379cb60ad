"""How engines share a machine: separate GPUs, and equal parts of cores and memory."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import ModelLoadError
from engine.kv_cache import sizing
from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec
from engine.paths import default_model_dir
from engine.replicas import startup
from engine.replicas.startup import replica_configs
from engine.runner import device
from engine.runner.device import divide_machine

CONFIG = EngineConfig(model="m", tensor_parallel_size=2)


def test_each_has_a_number_and_an_equal_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "free_host_bytes", lambda: 1000)
    assert replica_configs(CONFIG, 1)[0] is CONFIG
    configs = replica_configs(CONFIG, 3)
    assert [config.replica for config in configs] == [0, 1, 2]
    assert [config.first_device for config in configs] == [0, 2, 4]
    assert {config.host_share_bytes for config in configs} == {333}


@pytest.mark.parametrize(
    ("ranks", "engines", "asked", "given"),
    [(1, 1, None, None), (1, 2, None, 4), (2, 2, None, 2), (4, 4, None, 1), (1, 2, 6, 6)],
)
def test_cores_are_divided(
    ranks: int, engines: int, asked: int | None, given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "usable_threads", lambda: 8)
    config = EngineConfig(
        model="m",
        device="cpu",
        tensor_parallel_size=ranks,
        num_replicas=engines,
        num_threads=asked,
    )
    assert divide_machine(config).num_threads == given


@pytest.mark.parametrize(
    ("ranks", "engines", "told"),
    [
        (1, 4, "data_parallel_size 4: torch finds 3 GPUs"),
        (2, 2, "data_parallel_size 2 of tensor_parallel_size 2: torch finds 3 GPUs"),
        (4, 1, "tensor_parallel_size 4: torch finds 3 GPUs"),
        (3, 1, None),
    ],
)
def test_gpus_must_be_there(
    ranks: int, engines: int, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = EngineConfig(model="m", tensor_parallel_size=ranks, num_replicas=engines)
    if told is None:
        assert divide_machine(config) is config
        return
    with pytest.raises(ModelLoadError) as caught:
        divide_machine(config)
    assert str(caught.value) == told


def test_a_cache_is_planned_within_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the others have taken theirs, when all memory still seems free."""
    monkeypatch.setattr(sizing, "available_bytes", lambda device: 100 * 2**30)
    spec = read_config(default_model_dir()).spec
    assert isinstance(spec, DecoderSpec)

    def plan(memory_bytes: int, **fields: int):
        return sizing.plan_memory(
            spec,
            CacheConfig(memory_bytes=memory_bytes),
            SchedulerConfig(),
            block_size=16,
            max_model_len=None,
            dtype=torch.float32,
            device=torch.device("cpu"),
            weights_bytes=2**30,
            **fields,
        )

    assert plan(2 * 2**30).kv_cache_bytes == 2 * 2**30
    assert plan(2 * 2**30, max_shared_bytes=3 * 2**30).free_bytes == 0
    with pytest.raises(ModelLoadError, match="1,024 MiB are free"):
        plan(2 * 2**30, max_shared_bytes=2 * 2**30)
    with pytest.raises(ModelLoadError, match="512 MiB are free"):  # for each of two ranks
        plan(2**30, max_shared_bytes=3 * 2**30, num_processes=2)


def test_the_share_crosses_to_the_engine() -> None:
    (_, config) = replica_configs(CONFIG, 2)
    assert msgspec.convert(msgspec.to_builtins(config), EngineConfig) == config
