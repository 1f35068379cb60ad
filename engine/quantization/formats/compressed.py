"""compressed-tensors checkpoints, as written by llm-compressor.

The config's groups assign schemes to modules; its ``format`` says how they are stored:

    pack-quantized    X.weight_packed int32, codes end to end along the inputs (zeros: the outputs)
    int-quantized     X.weight int8
    float-quantized   X.weight float8_e4m3fn
    naive-quantized   either of these two
    nvfp4-pack-quantized, mxfp4-pack-quantized
                      X.weight_packed uint8, two codes a byte as in MXFP4; of the former, scales are
                      float8 in groups of 16, divided by X.weight_global_scale

each with ``X.weight_scale`` and, if present, ``X.weight_zero_point`` and ``X.weight_g_idx``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import ExpectedTensor, Recipe
from engine.models.safetensors import TensorEntry
from engine.quantization.formats.bits import integer_weight, num_words, unpack_words
from engine.quantization.formats.fp8 import float8_recipe, make_float8
from engine.quantization.formats.module_names import ModuleNames
from engine.quantization.formats.mxfp4 import GROUP, powers_of_two
from engine.quantization.formats.nvfp4 import make_nvfp4, nvfp4_tensors
from engine.quantization.formats.shared import (
    FLOAT8,
    FLOATS,
    INT32,
    UINT8,
    expand_scales,
    read_group_size,
    stem_of,
)
from kernels.packed import MXFP4_LEVELS, PackedWeight

_PACKED, _INT, _FLOAT, _NAIVE = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
)
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE, _NVFP4, _MXFP4)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_SCALE = ".weight_scale"
_INT8, _INT64 = (torch.int8,), (torch.int64,)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a group of modules are quantised."""

    targets: ModuleNames
    format: str
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    rounds_inputs: bool  # activations are rounded to the same eight bits

    @property
    def display_name(self) -> str:
        """Its name for users."""
        kind = "FP" if self.is_float else "INT"
        return f"{kind}{self.bits} {self.format}"


class CompressedTensors:
    """See ``engine.models.packed_tensors.QuantFormat``. One object per checkpoint.

    Args:
        schemes: the first one that matches a module applies.
        ignored: modules that are dense even if a scheme matches.
    """

    def __init__(self, schemes: Sequence[Scheme], ignored: ModuleNames) -> None:
        self._schemes = tuple(schemes)
        self._ignored = ignored
        self._scheme_of: dict[str, Scheme] | None = None  # by module, once it has been determined

    @property
    def name(self) -> str:
        """See ``QuantFormat``."""
        kinds = dict.fromkeys(scheme.display_name for scheme in self._schemes)
        return f"compressed-tensors ({', '.join(kinds)})"

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """See ``QuantFormat``: modules that a scheme matches, that are not ignored and have a
        scale."""
        if self._scheme_of is None:
            scales = (other for other in present if other.endswith(_SCALE))
            self._scheme_of = self._sort({scale.removesuffix(_SCALE) for scale in scales})
        scheme = self._scheme_of.get(stem_of(name))
        return None if scheme is None else _recipe(scheme, name, shape, present)

    def _sort(self, modules: set[str]) -> dict[str, Scheme]:
        """Assign all modules at once, because patterns are matched in a separate process."""
        left = modules - self._ignored.matching(modules)
        found: dict[str, Scheme] = {}
        for scheme in self._schemes:
            named = left if "Linear" in scheme.targets else scheme.targets.matching(left)
            found |= dict.fromkeys(named, scheme)
            left = left - named
        return found


def read_compressed_tensors(reader: ConfigReader) -> CompressedTensors:
    """Read a ``quantization_config`` of compressed-tensors. Raises ModelLoadError."""
    for key in ("quant_method", "quantization_status", "global_compression_ratio", "version"):
        reader.ignore(key)
    # The server's settings decide how keys and values are cached.
    reader.ignore("kv_cache_scheme")
    reader.refuse("transform_config", "is set: rotations of activations are not supported")
    sparsity = reader.mapping("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise reader.error("sparsity_config", "describes sparse weights, which are not supported")
    default = reader.text("format", "dense")
    groups = reader.section("config_groups")
    if groups is None:
        raise reader.error("config_groups", "is missing")
    schemes = [_read_scheme(groups, key, default) for key in groups.names]
    return CompressedTensors(schemes, ModuleNames.read(reader, "ignore"))


def _read_scheme(groups: ConfigReader, key: str, default: str) -> Scheme:
    group = groups.section(key)
    weights = group.section("weights") if group is not None else None
    if group is None or weights is None:
        raise groups.error(key, "has no 'weights'")
    stored = group.text("format", default)
    if stored not in _FORMATS:
        raise group.error("format", f"is {stored[:80]!r}; known: {', '.join(_FORMATS)}")
    group.refuse("output_activations", "is set: outputs are not rounded here")
    inputs = group.mapping("input_activations")
    strategy = weights.text("strategy", "tensor")
    if strategy not in _STRATEGIES:
        raise weights.error("strategy", f"is {strategy[:80]!r}; known: {', '.join(_STRATEGIES)}")
    kind = weights.text("type", "int")
    scheme = Scheme(
        targets=ModuleNames.read(group, "targets"),
        format=stored,
        bits=weights.count("num_bits"),
        is_float=kind == "float",
        is_symmetric=weights.flag("symmetric", default=True),
        strategy=strategy,
        group_size=read_group_size(weights, "group_size") if "group" in strategy else None,
        block=weights.int_pair("block_structure") if strategy == "block" else None,
        rounds_inputs=inputs.get("type") == kind and inputs.get("num_bits") == 8,
    )
    if kind not in ("int", "float") or scheme.bits not in (4, 8):
        raise weights.error("num_bits", f"is {scheme.bits} of type {kind[:80]!r}: not supported")
    for harmless in ("actorder", "dynamic", "observer", "observer_kwargs", "scale_dtype"):
        weights.ignore(harmless)
    weights.ignore("zp_dtype")
    weights.finish()
    group.finish()
    return scheme


def _recipe(
    scheme: Scheme, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
) -> Recipe:
    stem, (outputs, inputs) = stem_of(name), shape
    unused = (f"{stem}.input_scale", f"{stem}.input_zero_point", f"{stem}.input_global_scale")
    if scheme.format in (_NVFP4, _MXFP4):
        return _float4_recipe(scheme, stem, shape, (*unused, f"{stem}.weight_shape"))
    if scheme.is_float:
        return _float8_recipe(scheme, name, shape, present)
    group = min(scheme.group_size or inputs, inputs)
    groups = -(-inputs // group)
    forms = ((outputs, groups), (1,), (), (1, 1), (outputs,))
    scale = f"{stem}.weight_scale"
    given = present[scale].shape
    allowed = groups == 1 and given in forms
    tensors = {"scales": ExpectedTensor(scale, given if allowed else forms[0], FLOATS)}
    zeros = f"{stem}.weight_zero_point"
    if scheme.format == _PACKED:
        words = num_words(inputs, scheme.bits)
        tensors["words"] = ExpectedTensor(f"{stem}.weight_packed", (outputs, words), INT32)
        tensors["shape"] = ExpectedTensor(f"{stem}.weight_shape", (2,), _INT64 + INT32)
        if not scheme.is_symmetric:
            rows = num_words(outputs, scheme.bits)
            tensors["zero_words"] = ExpectedTensor(zeros, (rows, groups), INT32)
    else:
        tensors["codes"] = ExpectedTensor(name, shape, _INT8)
        if not scheme.is_symmetric:
            tensors["zeros"] = ExpectedTensor(zeros, tensors["scales"].shape, _INT8)
    if scheme.is_symmetric:
        unused = (*unused, zeros)
    if f"{stem}.weight_g_idx" in present:
        tensors["groups"] = ExpectedTensor(f"{stem}.weight_g_idx", (inputs,), INT32)
    return Recipe(tensors, partial(_make_integers, scheme, shape, group), unused)


def _make_integers(
    scheme: Scheme, shape: tuple[int, int], group: int, tensors: Mapping[str, torch.Tensor]
) -> PackedWeight:
    outputs, inputs = shape
    groups = -(-inputs // group)
    # Shift signed codes by half of the range to make them unsigned.
    middle, zeros = 1 << scheme.bits - 1, None
    if "words" in tensors:
        if tensors["shape"].tolist() != list(shape):
            raise ValueError(f"its weight_shape is {tensors['shape'].tolist()}, not {list(shape)}")
        codes = unpack_words(tensors["words"], scheme.bits, inputs)
    else:
        codes = (tensors["codes"].to(torch.int16) + middle).to(torch.uint8)
    if "zero_words" in tensors:
        zeros = unpack_words(tensors["zero_words"].T, scheme.bits, outputs).T
    elif "zeros" in tensors:
        zeros = tensors["zeros"].reshape(-1, groups).to(torch.int16) + middle
        zeros = zeros.expand(outputs, -1)
    scales = expand_scales(tensors["scales"].reshape(-1, groups), outputs)
    order = tensors.get("groups")
    if order is not None and bool((order < 0).all()):
        order = None  # llm-compressor's value for "not used"
    weight = integer_weight(codes, scheme.bits, scales, zeros, group, order)
    if scheme.rounds_inputs and weight.bits == 8:
        return weight.with_quantised_activations()
    return weight


def _float8_recipe(
    scheme: Scheme, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
) -> Recipe:
    stem, (outputs, inputs) = stem_of(name), shape
    if scheme.block is None and scheme.group_size is None:
        plain = float8_recipe(name, shape, present, rounds_inputs=scheme.rounds_inputs)
        return Recipe(plain.tensors, plain.make, (*plain.unused, f"{stem}.weight_zero_point"))
    rows, columns = scheme.block or (1, scheme.group_size or inputs)
    blocks = -(-outputs // rows), -(-inputs // columns)
    tensors = {
        "codes": ExpectedTensor(name, shape, FLOAT8),
        "scales": ExpectedTensor(f"{stem}.weight_scale", blocks, FLOATS),
    }
    make = partial(
        make_float8, shape, rows, min(columns, inputs), rounds_inputs=scheme.rounds_inputs
    )
    return Recipe(tensors, make, (f"{stem}.input_scale", f"{stem}.weight_zero_point"))


def _float4_recipe(
    scheme: Scheme, stem: str, shape: tuple[int, int], unused: tuple[str, ...]
) -> Recipe:
    (outputs, inputs), names = shape, (f"{stem}.weight_packed", f"{stem}.weight_scale")
    if scheme.format == _NVFP4:
        tensors = nvfp4_tensors(*names, shape)
        tensors["divisor"] = ExpectedTensor(f"{stem}.weight_global_scale", (1,), (torch.float32,))
    else:
        tensors = {
            "codes": ExpectedTensor(names[0], (outputs, -(-inputs // 2)), UINT8),
            "scales": ExpectedTensor(names[1], (outputs, -(-inputs // GROUP)), UINT8),
        }
    return Recipe(tensors, partial(_make_float4, inputs), unused)


def _make_float4(inputs: int, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    codes, scales = tensors["codes"], tensors["scales"]
    if "divisor" in tensors:
        return make_nvfp4(codes, scales.float() / tensors["divisor"], inputs)
    return PackedWeight(codes, powers_of_two(scales), inputs, GROUP, MXFP4_LEVELS)
