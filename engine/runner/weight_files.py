"""Where a model's weights come from, and the form in which they are held.

What reads one of the many forms is imported for a model that has it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.models.checkpoint import ModelConfig, read_headers
from engine.models.loader import Cuts, Weights, dummy_weights, load_weights
from engine.models.safetensors import Header
from engine.models.spec import DecoderSpec
from engine.models.stored import Format
from engine.quantization import refuse_codes
from engine.runner.device import dtype_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of one model, not read yet.

    Attributes:
        model: whose they are.
        headers: the tables of its files; empty for a GGUF file and for random weights.
        stored_as: how a quantised checkpoint has its matrices; None: dense.
        gguf_codes: what a GGUF file is quantised to, for users; None: its weights are widened, or
            it is none.
        seed: of random weights; None: those of the files are read.
    """

    model: ModelConfig
    headers: list[Header]
    stored_as: Format | None
    gguf_codes: str | None
    seed: int | None

    @property
    def codes(self) -> str | None:
        """The format that matrices are held in, for users; None: they are dense."""
        return self.gguf_codes if self.stored_as is None else self.stored_as.name

    def open(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: LoadProgress | None = None,
        cuts: Cuts | None = None,
    ) -> Weights:
        """The parameters, each read when it is asked for; with ``cuts``, one rank's share of each.

        Raises:
            ModelLoadError: a tensor has no place, a place has no tensor, or a shape differs.
        """
        if self.seed is not None:
            return dummy_weights(spec, dtype, device, self.seed, on_progress, cuts)
        if self.model.gguf is not None:
            from engine.gguf.blocks import FORMATS
            from engine.gguf.weights import GgufWeights

            types = FORMATS.keys() if self.gguf_codes else ()
            given = self.model.gguf, spec, dtype, device, on_progress
            return GgufWeights(*given, packed=types, cuts=cuts)
        headers, stored_as = self.headers, self.stored_as
        return load_weights(spec, headers, dtype, device, on_progress, stored_as, cuts)


def find_weights(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> WeightFiles:
    """Read the tables of a model's files, and how they are quantised.

    Args:
        config: of the engine.
        model: the model itself, or one that drafts for it.
        dtype: to be computed in.
        device: to be computed on.
        seed: of its weights, where ``config`` asks for random ones.

    Raises:
        ModelLoadError: a file is missing or damaged, or quantised in a way that is not supported.
    """
    if config.load_format == "dummy":
        if model.quantization_config is not None:
            logger.warning("random weights are dense, though the checkpoint's would be quantised")
        return WeightFiles(model, [], None, None, seed)
    if model.gguf is not None:
        codes = _gguf_codes(config, model, dtype, device)
        return WeightFiles(model, [], None, codes, None)
    headers = read_headers(model.directory, config.load_format)
    stored_as = None
    if model.quantization_config is not None:
        from engine.quantization.formats import read_format

        where = f"{model.directory / 'config.json'}, 'quantization_config'"
        stored_as = read_format(model.quantization_config, where)
    return WeightFiles(model, headers, stored_as, None, None)


def _gguf_codes(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    """What a GGUF file is quantised to, where a kernel multiplies such codes as they lie.

    Elsewhere, and where more than the kernel's precision is asked for, its weights are widened
    while they load, and the log says so.
    """
    from engine.gguf.spec import stored_format

    kind = None if model.gguf is None else stored_format(model.gguf)
    if kind is None:
        return None
    if device.type == "cpu" and dtype != torch.bfloat16:
        reason = "the kernel that multiplies them computes in bfloat16"
    else:
        reason = refuse_codes(dtype, device, invariant=config.batch_invariant)
    if reason is None:
        return f"GGUF {kind}"
    logger.info("weights in GGUF %s are widened to %s: %s", kind, dtype_name(dtype), reason)
    return None
