"""bitsandbytes checkpoints: four bits (Dettmers et al. 2023, QLoRA) and eight (LLM.int8).

Four bits, in blocks of consecutive weights that ignore row boundaries:

    X.weight                  bytes of two codes, the first in the high half
    X.weight.quant_map        [16] float32, the codes' values
    X.weight.absmax           [blocks] float32 scales; or uint8, quantised again, together with
    X.weight.nested_quant_map [256] float32
    X.weight.nested_absmax    [blocks / nested_blocksize] float32
    X.weight.quant_state.bitsandbytes__nf4 (or fp4)   JSON as bytes: shape, block sizes, an offset

Eight bits:

    X.weight [outputs, inputs] int8     X.SCB [outputs] float32, the value of code 127
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd, isfinite, prod

import msgspec
import torch

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import ExpectedTensor, Recipe
from engine.models.safetensors import TensorEntry
from engine.quantization.formats.shared import FLOATS, UINT8, stem_of
from kernels.packed import PackedWeight

_KINDS = ("nf4", "fp4")
_FLOAT32 = (torch.float32,)
_MAX_STATE_BYTES = 4096
_UNREAD = """
    _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload
    llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit
    quant_method
"""


class _State(msgspec.Struct):
    """The contents of ``quant_state``; other keys have no effect."""

    shape: list[int]
    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """See ``engine.models.packed_tensors.QuantFormat``. Each matrix's tensors show how it is
    stored."""

    name: str

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """See ``QuantFormat``."""
        entry = present.get(name)
        if entry is None:
            return None
        for kind in _KINDS:
            state = f"{name}.quant_state.bitsandbytes__{kind}"
            if state in present:
                return _four_bits(name, state, shape, present)
        stem = stem_of(name)
        if entry.dtype != torch.int8 and f"{stem}.SCB" not in present:
            return None
        tensors = {
            "codes": ExpectedTensor(name, shape, (torch.int8,)),
            "peaks": ExpectedTensor(f"{stem}.SCB", (shape[0],), FLOATS),
        }
        return Recipe(tensors, _make_int8, (f"{stem}.weight_format",))


def read_bitsandbytes(reader: ConfigReader) -> BitsAndBytes:
    """Read a ``quantization_config`` of bitsandbytes. Raises ModelLoadError."""
    is_4bit = reader.flag("load_in_4bit")
    kind = reader.text("bnb_4bit_quant_type", "nf4").upper() if is_4bit else "INT8"
    for key in _UNREAD.split():
        reader.ignore(key)
    return BitsAndBytes(f"bitsandbytes {kind}")


def _four_bits(
    name: str, state: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
) -> Recipe:
    size = -(-prod(shape) // 2)
    # The bytes may be declared with another dtype, to make sharding them easier.
    held = present[name]
    width = held.dtype.itemsize
    state_size = min(present[state].num_bytes, _MAX_STATE_BYTES)
    tensors = {
        "codes": ExpectedTensor(name, (-(-size // width), 1), (held.dtype,)),
        "state": ExpectedTensor(state, (state_size,), UINT8),
        "levels": ExpectedTensor(f"{name}.quant_map", (16,), _FLOAT32),
    }
    absmax = present.get(f"{name}.absmax")
    blocks = absmax.shape[:1] if absmax is not None else (0,)
    nested = f"{name}.nested_absmax"
    if nested in present:
        tensors["absmax"] = ExpectedTensor(f"{name}.absmax", blocks, UINT8)
        tensors["nested_levels"] = ExpectedTensor(f"{name}.nested_quant_map", (256,), _FLOAT32)
        tensors["nested_absmax"] = ExpectedTensor(nested, present[nested].shape[:1], _FLOAT32)
    else:
        tensors["absmax"] = ExpectedTensor(f"{name}.absmax", blocks, _FLOAT32)
    return Recipe(tensors, partial(_make_four_bits, shape))


def _make_four_bits(shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    outputs, inputs = shape
    state = _read_state(tensors["state"])
    if prod(state.shape) != prod(shape) or state.shape[-1] != inputs:
        raise ValueError(f"its quant_state tells of shape {state.shape}"[:120])
    absmax = _absmax(state, tensors)
    if len(absmax) != -(-prod(shape) // state.blocksize):
        raise ValueError(f"{len(absmax)} scales for blocks of {state.blocksize}")
    # Blocks continue across rows: a group that divides both is within one block and one row.
    group = gcd(state.blocksize, inputs)
    starts = torch.arange(outputs * (inputs // group)) * group
    scales = absmax[starts // state.blocksize].view(outputs, -1)
    stored = tensors["codes"].flatten().view(torch.uint8)
    if inputs % 2:
        stored = torch.stack((stored >> 4, stored & 15), dim=1).flatten()[: prod(shape)]
        padded = torch.nn.functional.pad(stored.view(shape), (0, 1))
        codes = padded[:, ::2] | padded[:, 1::2] << 4
    else:
        halves = stored[: prod(shape) // 2].view(outputs, -1)
        codes = halves >> 4 | halves << 4
    levels = tuple(tensors["levels"].tolist())
    if not all(isfinite(level) for level in levels):
        raise ValueError("a level of its quant_map is not a number")
    return PackedWeight(codes, scales, inputs, group, levels)


def _absmax(state: _State, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    absmax = tensors["absmax"]
    if "nested_absmax" not in tensors:
        return absmax
    nested = tensors["nested_absmax"]
    if state.nested_blocksize < 1 or len(nested) != -(-len(absmax) // state.nested_blocksize):
        raise ValueError(f"{len(nested)} scales of scales for blocks of {state.nested_blocksize}")
    blocks = torch.arange(len(absmax)) // state.nested_blocksize
    return tensors["nested_levels"][absmax.long()] * nested[blocks] + state.nested_offset


def _read_state(raw: torch.Tensor) -> _State:
    try:
        state = msgspec.json.decode(raw.numpy().tobytes(), type=_State)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValueError("its quant_state is not the JSON that it must be") from None
    if state.blocksize < 1 or not state.shape or not isfinite(state.nested_offset):
        raise ValueError("its quant_state has a value out of range")
    return state


def _make_int8(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    codes, scales = tensors["codes"], tensors["peaks"].float() / 127
    return PackedWeight(codes, scales[:, None], codes.shape[1], codes.shape[1])
