"""Checkpoints of NVIDIA's ModelOpt: NVFP4, FP8 and MXFP8, or several in one.

    X.weight          [outputs, inputs / 2] uint8, or [outputs, inputs] float8_e4m3fn
    X.weight_scale    [outputs, inputs / 16] float8_e4m3fn, or a float for the matrix
                      MXFP8: [outputs, inputs / 32] uint8, exponents of two as in MXFP4
    X.weight_scale_2  NVFP4: a factor of these scales
    X.input_scale     static activation scale; unused

Matrices of other types are dense. The config is in ``hf_quant_config.json`` in older exports, and
in some that file's section is within the one of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import ExpectedTensor, Recipe
from engine.models.safetensors import TensorEntry
from engine.quantization.formats.fp8 import float8_recipe, make_float8
from engine.quantization.formats.mxfp4 import GROUP as MX_GROUP
from engine.quantization.formats.mxfp4 import powers_of_two
from engine.quantization.formats.nvfp4 import GROUP, make_nvfp4, nvfp4_tensors
from engine.quantization.formats.shared import FLOAT8, UINT8, stem_of
from kernels.packed import PackedWeight

_MXFP8 = "MXFP8"
_SUPPORTED = (
    *("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", _MXFP8, "MIXED_PRECISION"),
)
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
        stem = stem_of(name)
        if entry is not None and entry.dtype in FLOAT8:
            scale = present.get(f"{stem}.weight_scale")
            if scale is not None and scale.dtype in UINT8:
                return _mxfp8_recipe(name, shape)
            return float8_recipe(name, shape, present)
        if entry is None or entry.dtype not in UINT8:
            return None
        factor = f"{stem}.weight_scale_2"
        given = present[factor].shape if factor in present else ()
        tensors = nvfp4_tensors(name, f"{stem}.weight_scale", shape)
        tensors["factor"] = ExpectedTensor(factor, given if given == (1,) else (), (torch.float32,))

        def make(read: Mapping[str, torch.Tensor]) -> PackedWeight:
            return make_nvfp4(read["codes"], read["scales"].float() * read["factor"], shape[1])

        return Recipe(tensors, make, (f"{stem}.input_scale",))


def read_modelopt(reader: ConfigReader) -> ModelOpt:
    """Read a ``quantization_config`` of ModelOpt. Raises ModelLoadError."""
    inner = reader.section("quantization")
    if inner is not None:
        reader.ignore("quant_method")
        reader.ignore("producer")
        found = read_modelopt(inner)
        inner.finish()
        return found
    algorithm = reader.text("quant_algo", "")
    if algorithm not in _SUPPORTED:
        known = ", ".join(_SUPPORTED)
        raise reader.error("quant_algo", f"is {algorithm[:80]!r}; supported: {known}")
    reader.require("group_size", MX_GROUP if algorithm == _MXFP8 else GROUP)
    for key in ("has_zero_point", "pre_quant_scale"):
        reader.require(key, False)
    for key in _UNREAD.split():
        reader.ignore(key)
    return ModelOpt(algorithm)


def _mxfp8_recipe(name: str, shape: tuple[int, int]) -> Recipe:
    outputs, inputs = shape
    tensors = {
        "codes": ExpectedTensor(name, shape, FLOAT8),
        "exponents": ExpectedTensor(
            f"{stem_of(name)}.weight_scale", (outputs, -(-inputs // MX_GROUP)), UINT8
        ),
    }
    return Recipe(tensors, partial(_make_mxfp8, shape))


def _make_mxfp8(shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    scaled = {"codes": tensors["codes"], "scales": powers_of_two(tensors["exponents"])}
    return make_float8(shape, 1, min(MX_GROUP, shape[1]), scaled, rounds_inputs=False)
