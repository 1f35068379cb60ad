"""Where a model's weights come from, and the form in which they are held.

Readers of the less common forms are imported only for models that need them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.models.checkpoint import ModelConfig, read_headers
from engine.models.loader import Cuts, Weights, dummy_weights, load_weights
from engine.models.packed_tensors import QuantFormat
from engine.models.safetensors import Header
from engine.models.spec import DecoderSpec
from engine.quantization import packed_unsupported_reason
from engine.runner.device import dtype_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of one model, before they are read.

    Attributes:
        model: the model.
        headers: the tensor tables of its files; empty for a GGUF file and for random weights.
        quant_format: the format of a quantised checkpoint's matrices; None: dense.
        gguf_codes: the quantisation of a GGUF file, for users; None: its weights are widened, or it
            is not a GGUF file.
        seed: of random weights; None: the files are read.
    """

    model: ModelConfig
    headers: list[Header]
    quant_format: QuantFormat | None
    gguf_codes: str | None
    seed: int | None

    @property
    def codes(self) -> str | None:
        """The format in which matrices are held, for users; None: dense."""
        return self.gguf_codes if self.quant_format is None else self.quant_format.name

    def open(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: LoadProgress | None = None,
        cuts: Cuts | None = None,
    ) -> Weights:
        """Return the parameters, each read on access; with ``cuts``, one rank's shard of each.

        Raises:
            ModelLoadError: a tensor has no place, a place has no tensor, or a shape differs.
        """
        if self.seed is not None:
            return dummy_weights(spec, dtype, device, self.seed, on_progress, cuts)
        if self.model.gguf is not None:
            from engine.gguf.blocks import FORMATS
            from engine.gguf.weights import GgufWeights

            types = FORMATS.keys() if self.gguf_codes else ()
            return GgufWeights(
                self.model.gguf, spec, dtype, device, on_progress, packed=types, cuts=cuts
            )
        headers, stored_as = self.headers, self.quant_format
        return load_weights(spec, headers, dtype, device, on_progress, stored_as, cuts)


def find_weights(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> WeightFiles:
    """Read the tensor tables of a model's files, and how they are quantised.

    Args:
        config: of the engine.
        model: the model itself, or its draft model.
        dtype: to compute in.
        device: to compute on.
        seed: of the weights, if ``config`` asks for random ones.

    Raises:
        ModelLoadError: a file is missing or damaged, or its quantisation is not supported.
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
    """Return the quantisation of a GGUF file, if a kernel multiplies its codes directly.

    Otherwise, and if more than the kernel's precision is requested, the weights are widened while
    they load, and the log says so.
    """
    from engine.gguf.spec import stored_format

    kind = None if model.gguf is None else stored_format(model.gguf)
    if kind is None:
        return None
    if device.type == "cpu" and dtype != torch.bfloat16:
        reason = "the kernel that multiplies them computes in bfloat16"
    else:
        reason = packed_unsupported_reason(dtype, device, invariant=config.batch_invariant)
    if reason is None:
        return f"GGUF {kind}"
    logger.info("weights in GGUF %s are widened to %s: %s", kind, dtype_name(dtype), reason)
    return None
