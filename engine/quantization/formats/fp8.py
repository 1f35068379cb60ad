"""Checkpoints with float8 weights (e4m3): Hugging Face's ``fp8`` and ``fbgemm_fp8``, and
DeepSeek's.

    X.weight            [outputs, inputs] float8_e4m3fn
    X.weight_scale_inv  [outputs / 128, inputs / 128]   factors of blocks of codes, or
    X.weight_scale      [], [1], [outputs] or [outputs, 1]
    X.input_scale       static activation scale; unused, as activations are scaled per row
    X.activation_scale  the same, as Mistral names it

    X            [experts, outputs, inputs] float8_e4m3fn   all experts of a layer, with
    X_scale_inv  [experts, 1, 1], or factors of blocks      as in Mistral Small 4, or both with
                                                            the inputs first

Matrices whose weights are not float8 are dense; ``modules_to_not_convert`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import ExpectedTensor, Recipe
from engine.models.safetensors import TensorEntry
from engine.quantization.formats.shared import (
    FLOAT8,
    FLOATS,
    check_float8,
    expand_scales,
    stem_of,
)
from kernels.packed import PackedWeight

_SCALES = (*FLOATS, torch.float8_e8m0fnu)
# The tensors show which matrices are dense; for activations see above.
_UNREAD = """
    act_per_tensor activation_scale_ub activation_scheme dequantize ignored_layers kv_cache_scheme
    modules_to_convert modules_to_not_convert scale_fmt weight_per_tensor
"""


@dataclass(frozen=True, slots=True)
class Fp8:
    """See ``engine.models.packed_tensors.QuantFormat``."""

    block: tuple[int, int] | None  # outputs and inputs that share a scale

    @property
    def name(self) -> str:
        """See ``QuantFormat``."""
        return "FP8" if self.block is None else "FP8 in blocks"

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """See ``QuantFormat``: float8 matrices are quantised."""
        entry = present.get(name)
        if entry is None or entry.dtype not in FLOAT8:
            return None
        if len(entry.shape) == 3:
            return self._experts_recipe(name, shape, entry.shape)
        stem = stem_of(name)
        if self.block is None or f"{stem}.weight_scale_inv" not in present:
            return float8_recipe(name, shape, present)
        (rows, columns), (outputs, inputs) = self.block, shape
        blocks = -(-outputs // rows), -(-inputs // columns)
        tensors = {
            "codes": ExpectedTensor(name, shape, FLOAT8),
            "scales": ExpectedTensor(f"{stem}.weight_scale_inv", blocks, _SCALES),
        }
        make = partial(make_float8, shape, rows, min(columns, inputs))
        return Recipe(tensors, make, _activation_scales(stem))

    def _experts_recipe(self, name: str, shape: tuple[int, int], stored: tuple[int, ...]) -> Recipe:
        """Return the recipe of all experts of a layer in one tensor.

        Tools that rounded Qwen3-VL's experts as they were published left the inputs first.
        """
        (outputs, inputs), count = shape, max(stored[0], 1)
        own = outputs // count
        # Not where the layer's other tensor would be square, so that nothing told its order.
        turned = stored == (count, inputs, own) and own not in (inputs, 2 * inputs)
        block = self.block or (own, inputs)
        rows, columns = reversed(block) if turned and self.block else block
        codes, scales = (own, inputs), (-(-own // rows), -(-inputs // columns))
        if turned:
            codes, scales = codes[::-1], scales[::-1]
        tensors = {
            "codes": ExpectedTensor(name, (count, *codes), FLOAT8),
            "scales": ExpectedTensor(f"{name}_scale_inv", (count, *scales), _SCALES),
        }

        def make(read: Mapping[str, torch.Tensor]) -> PackedWeight:
            found = {part: held.mT if turned else held for part, held in read.items()}
            # A scale for each output: an expert may end within a block.
            factors = found["scales"].repeat_interleave(rows, dim=1)[:, :own]
            flat = {"codes": found["codes"].flatten(0, 1), "scales": factors.flatten(0, 1)}
            return make_float8(shape, 1, min(columns, inputs), flat)

        return Recipe(tensors, make, (f"{name}_activation_scale",))


def float8_recipe(
    name: str,
    shape: tuple[int, int],
    present: Mapping[str, TensorEntry],
    *,
    rounds_inputs: bool = True,
) -> Recipe:
    """Return the recipe of a float8 matrix with one scale, or one per output."""
    stem, (outputs, inputs) = stem_of(name), shape
    scale = f"{stem}.weight_scale"
    if scale not in present and f"{stem}.weight_scale_inv" in present:
        scale = f"{stem}.weight_scale_inv"
    forms = ((), (1,), (1, 1), (outputs,), (outputs, 1))
    given = present[scale].shape if scale in present else (outputs, 1)
    tensors = {
        "codes": ExpectedTensor(name, shape, FLOAT8),
        "scales": ExpectedTensor(scale, given if given in forms else (outputs, 1), _SCALES),
    }
    make = partial(make_float8, shape, 1, inputs, rounds_inputs=rounds_inputs)
    return Recipe(tensors, make, _activation_scales(stem))


def make_float8(
    shape: tuple[int, int],
    rows: int,
    columns: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    rounds_inputs: bool = True,
) -> PackedWeight:
    """Make the weight from ``codes`` and ``scales``, one for each ``rows`` x ``columns`` codes."""
    codes, scales = tensors["codes"], tensors["scales"]
    check_float8(codes)
    groups = -(-shape[1] // columns)
    scales = expand_scales(scales.reshape(-1, groups), shape[0], rows)
    return PackedWeight(codes, scales, shape[1], columns, has_quantised_activations=rounds_inputs)


def read_fp8(reader: ConfigReader) -> Fp8:
    """Read a ``quantization_config`` of either name. Raises ModelLoadError."""
    reader.ignore("quant_method")
    reader.require("expert_dtype", "fp8")
    if not reader.has_value("fmt", "float8_e4m3fn"):  # as MiniMax writes it
        reader.require("fmt", "e4m3")
    for key in _UNREAD.split():
        reader.ignore(key)
    if "weight_block_size" not in reader:
        return Fp8(None)
    rows, columns = reader.int_pair("weight_block_size")
    return Fp8((rows, columns))


def _activation_scales(stem: str) -> tuple[str, str]:
    """Return the names of a matrix's static activation scale."""
    return f"{stem}.input_scale", f"{stem}.activation_scale"
