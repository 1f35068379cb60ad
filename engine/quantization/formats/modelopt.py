"""Checkpoints of NVIDIA's ModelOpt: NVFP4 and FP8, or both in one.

    X.weight          [outputs, inputs / 2] uint8, or [outputs, inputs] float8_e4m3fn
    X.weight_scale    [outputs, inputs / 16] float8_e4m3fn, or a float for the matrix
    X.weight_scale_2  NVFP4: a factor of these scales
    X.input_scale     static activation scale; unused

Matrices of other types are dense. The config is in ``hf_quant_config.json`` in older exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import ExpectedTensor, Recipe
from engine.models.safetensors import TensorEntry
from engine.quantization.formats.fp8 import float8_recipe
from engine.quantization.formats.nvfp4 import GROUP, make_nvfp4, nvfp4_tensors
from engine.quantization.formats.shared import FLOAT8, UINT8, stem_of
from kernels.packed import PackedWeight

_SUPPORTED = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION")
# The tensors show how each matrix is stored; the server's settings decide how keys and values are.
_UNREAD = """
    config_groups exclude_modules ignore kv_cache_quant_algo kv_cache_scheme producer quant_method
    quantized_layers
"""


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """See ``engine.models.packed_tensors.QuantFormat``."""

    algorithm: str

    @property
    def name(self) -> str:
        """See ``QuantFormat``."""
        return f"ModelOpt {self.algorithm}"

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """See ``QuantFormat``: matrices of bytes or of float8 are quantised."""
        entry = present.get(name)
        if entry is not None and entry.dtype in FLOAT8:
            return float8_recipe(name, shape, present)
        if entry is None or entry.dtype not in UINT8:
            return None
        stem = stem_of(name)
        factor = f"{stem}.weight_scale_2"
        given = present[factor].shape if factor in present else ()
        tensors = nvfp4_tensors(name, f"{stem}.weight_scale", shape)
        tensors["factor"] = ExpectedTensor(factor, given if given == (1,) else (), (torch.float32,))

        def make(read: Mapping[str, torch.Tensor]) -> PackedWeight:
            return make_nvfp4(read["codes"], read["scales"].float() * read["factor"], shape[1])

        return Recipe(tensors, make, (f"{stem}.input_scale",))


def read_modelopt(reader: ConfigReader) -> ModelOpt:
    """Read a ``quantization_config`` of ModelOpt. Raises ModelLoadError."""
    algorithm = reader.text("quant_algo", "")
    if algorithm not in _SUPPORTED:
        known = ", ".join(_SUPPORTED)
        raise reader.error("quant_algo", f"is {algorithm[:80]!r}; supported: {known}")
    reader.require("group_size", GROUP)
    for key in _UNREAD.split():
        reader.ignore(key)
    return ModelOpt(algorithm)
