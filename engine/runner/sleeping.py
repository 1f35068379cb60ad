"""Sleeping models: their memory is freed, and they can serve again.

    runner ──sleep──► sleeping model ──wake──► another runner
    KV cache, graphs        │                  KV cache and graphs made anew
    weights (level 2)       └─with_weights──► the same model with other weights

A runner consists of what was loaded and of what is made for it: the KV cache, row tables and
captured steps, which hold addresses of both. To sleep, the runner is dropped as a whole, so that
nothing that remains can point into freed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol, cast

import msgspec
import torch

from engine.config import Dtype, EngineConfig
from engine.errors import ModelLoadError
from engine.memory import trim_heap
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.encoder.spec import EncoderSpec
from engine.models.spec import DecoderSpec
from engine.runner.host_copy import HostCopy
from engine.runner.protocol import Runner, SleepingRunner
from engine.types import EngineInfo
from kernels.cpu.linear import arena

Spec = DecoderSpec | EncoderSpec
# Fields of a spec that describe the checkpoint, not what the model computes.
_MAY_DIFFER = frozenset({"checkpoint_dtype"})


class LoadedModel(Protocol):
    """A model in memory, without its KV cache."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    @property
    def reload_plan(self) -> ReloadPlan:
        """How to load it again."""
        ...

    def runner(self) -> Runner:
        """Make a runner with an empty KV cache. Raises ModelLoadError if it does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """What is needed to read a model again in the same way.

    Attributes:
        config: of the engine.
        spec: what every checkpoint read by it must match.
        info: of the model.
        load: reads a model by its config.
    """

    config: EngineConfig
    spec: Spec
    info: EngineInfo
    load: Callable[[EngineConfig, ModelConfig], LoadedModel]

    def read(self, model: str, generation: int) -> LoadedModel:
        """Read the model in the directory ``model``.

        Raises:
            ModelLoadError: it cannot be read, or is a different model.
        """
        read = read_config(model)
        _check_same(model, self.spec, read.spec)
        # Without a configured dtype, the first checkpoint determined it.
        dtype = cast(Dtype, self.info.dtype)
        config = msgspec.structs.replace(
            self.config, model=model, generation=generation, dtype=dtype
        )
        return self.load(config, read)


class SleepingModel:
    """See ``engine.runner.protocol.SleepingRunner``.

    Args:
        loaded: the model.
        level: how much of it is freed; see ``Runner.sleep``.
    """

    def __init__(self, loaded: LoadedModel, level: int) -> None:
        self._reload_plan = loaded.reload_plan
        self._device = torch.device(loaded.info.device)
        self._loaded = loaded if level < 2 else None
        self._offloads_weights = level == 1 and self._device.type == "cuda"
        self._on_host: HostCopy | None = None

    def release(self) -> None:
        """See ``SleepingRunner.release``."""
        if self._offloads_weights and self._loaded is not None:
            self._on_host = HostCopy.of(self._loaded, self._device)
        release_memory(self._device)

    def wake(self) -> Runner:
        """See ``SleepingRunner.wake``."""
        if self._on_host is not None:
            restore_weights(self._on_host, self._device)
            self._on_host = None
        loaded = self._loaded
        if loaded is None:
            info = self._reload_plan.info
            loaded = self._reload_plan.read(info.model, info.generation)
        return loaded.runner()

    def with_weights(self, model: str) -> SleepingRunner:
        """See ``SleepingRunner.with_weights``."""
        loaded = self._reload_plan.read(model, self._reload_plan.info.generation + 1)
        return SleepingModel(loaded, level=0)


def release_memory(device: torch.device) -> None:
    """Return unreferenced memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    arena.start_new_chunk()
    trim_heap()


def restore_weights(weights: HostCopy, device: torch.device) -> None:
    """Move weights from the host back to ``device``.

    Raises:
        ModelLoadError: they do not fit; it may be tried again.
    """
    try:
        weights.restore()
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"the weights do not fit {device}: {reason}") from None


def source_name(config: EngineConfig, seed: int | None) -> str:
    """Return the source of the weights for a model's fingerprint: other weights, another
    fingerprint.

    Args:
        config: of the engine.
        seed: of random weights; None: they are read from files.
    """
    source = "checkpoint" if seed is None else f"dummy {seed}"
    return f"{source} {config.generation}" if config.generation else source


def _check_same(model: str, ours: Spec, theirs: Spec) -> None:
    """Raise ModelLoadError unless both specs take the same weights."""
    if type(ours) is not type(theirs):
        raise ModelLoadError(f"{model}: is of another architecture than the model that is served")
    kept = {field.name: getattr(ours, field.name) for field in fields(ours)}
    like = replace(theirs, **{name: kept[name] for name in _MAY_DIFFER & kept.keys()})
    for name, value in kept.items():
        other = getattr(like, name)
        if other != value:
            raise ModelLoadError(
                f"{model}: is another model than the one that is served: its {name} is "
                f"{other!r:.80}, not {value!r:.80}"
            )
