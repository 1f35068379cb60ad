"""Models that rest: their memory is given back, and they can serve again.

    runner ──rest──► resting model ──wake──► another runner
    KV cache, graphs      │                  KV cache and graphs made anew
    weights (level 2)     └─exchanged──► the same model with other weights

A runner is put together of what is loaded and of what is made for it: the KV cache, tables of rows,
captured steps, which hold the addresses of both. To rest it is let go as a whole, so nothing stays
behind that could point at memory that is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Protocol, cast

import msgspec
import torch

from engine.config import Dtype, EngineConfig
from engine.errors import ModelLoadError
from engine.memory import trim
from engine.models.checkpoint import ModelConfig, read_config
from engine.models.encoder.spec import EncoderSpec
from engine.models.spec import DecoderSpec
from engine.runner.host_copy import HostCopy
from engine.runner.protocol import Resting, Runner
from engine.types import EngineInfo
from kernels.cpu.linear import arena

logger = logging.getLogger(__name__)

Spec = DecoderSpec | EncoderSpec
# Of a spec, what says how a checkpoint was written and not what the model computes.
_MAY_DIFFER = frozenset({"checkpoint_dtype"})


class LoadedModel(Protocol):
    """A model in memory, apart from its KV cache."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        ...

    @property
    def recipe(self) -> Recipe:
        """How to load it again."""
        ...

    def runner(self) -> Runner:
        """Put together with an empty KV cache. Raises ModelLoadError where that does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is needed to read a model again, as it was first read.

    Attributes:
        config: of the engine.
        spec: what any checkpoint read by it must be.
        info: of the model.
        load: reads a model by its config.
    """

    config: EngineConfig
    spec: Spec
    info: EngineInfo
    load: Callable[[EngineConfig, ModelConfig], LoadedModel]

    def read(self, model: str, generation: int) -> LoadedModel:
        """The model in the directory ``model``.

        Raises:
            ModelLoadError: it cannot be read, or is another one.
        """
        read = read_config(model)
        _check_same(model, self.spec, read.spec)
        # The dtype was chosen by the first checkpoint, where none was asked for.
        dtype = cast(Dtype, self.info.dtype)
        config = msgspec.structs.replace(
            self.config, model=model, generation=generation, dtype=dtype
        )
        return self.load(config, read)


class RestingModel:
    """See ``engine.runner.protocol.Resting``.

    Args:
        loaded: the model.
        level: how much of it is kept; see ``Runner.rest``.
    """

    def __init__(self, loaded: LoadedModel, level: int) -> None:
        self._recipe = loaded.recipe
        self._device = torch.device(loaded.info.device)
        self._loaded = loaded if level < 2 else None
        self._moves = level == 1 and self._device.type == "cuda"
        self._on_host: HostCopy | None = None

    def release(self) -> None:
        """See ``Resting.release``."""
        if self._moves and self._loaded is not None:
            self._on_host = HostCopy.of(self._loaded, self._device)
        give_back(self._device)

    def wake(self) -> Runner:
        """See ``Resting.wake``."""
        if self._on_host is not None:
            bring_back(self._on_host, self._device)
            self._on_host = None
        loaded = self._loaded
        if loaded is None:
            info = self._recipe.info
            loaded = self._recipe.read(info.model, info.generation)
        return loaded.runner()

    def exchanged(self, model: str) -> Resting:
        """See ``Resting.exchanged``."""
        loaded = self._recipe.read(model, self._recipe.info.generation + 1)
        return RestingModel(loaded, level=0)


def give_back(device: torch.device) -> None:
    """Memory that nobody refers to any more goes back to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    arena.leave()
    trim()


def bring_back(weights: HostCopy, device: torch.device) -> None:
    """Weights that are on the host go back to ``device``.

    Raises:
        ModelLoadError: they do not fit; it may be tried again.
    """
    try:
        weights.bring_back()
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"the weights do not fit {device}: {reason}") from None


def source_name(config: EngineConfig, seed: int | None) -> str:
    """Where weights come from, for a model's fingerprint: other weights, another fingerprint.

    Args:
        config: of the engine.
        seed: of random weights; None: those of files.
    """
    source = "checkpoint" if seed is None else f"dummy {seed}"
    return f"{source} {config.generation}" if config.generation else source


def _check_same(model: str, ours: Spec, theirs: Spec) -> None:
    """Raise ModelLoadError unless weights of the one are weights of the other."""
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
