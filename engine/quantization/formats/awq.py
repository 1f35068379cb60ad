"""AWQ checkpoints (Lin et al. 2023), in the layout that AutoAWQ calls "gemm".

    X.qweight [inputs, outputs / 8] int32   codes, eight outputs to a word
    X.qzeros  [groups, outputs / 8] int32   zeros, packed alike
    X.scales  [groups, outputs]

The eight nibbles of a word, from the lowest, are outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import ExpectedTensor, Recipe
from engine.models.safetensors import TensorEntry
from engine.quantization.formats.bits import integer_weight, num_words, unpack_words
from engine.quantization.formats.gptq import HISTORY
from engine.quantization.formats.shared import (
    FLOATS,
    INT32,
    group_of,
    read_group_size,
    stem_of,
)
from kernels.packed import PackedWeight

_BITS = 4
_NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds output i
# Besides GPTQ's keys, which GPTQModel and transformers 5 write for AWQ, too.
_HISTORY = "do_fuse fuse_max_seq_len modules_to_fuse modules_to_not_convert"


@dataclass(frozen=True, slots=True)
class Awq:
    """See ``engine.models.packed_tensors.QuantFormat``."""

    group_size: int | None  # None: all inputs are one group

    @property
    def name(self) -> str:
        """See ``QuantFormat``."""
        return "AWQ, 4 bits"

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """See ``QuantFormat``: matrices with ``qweight`` are quantised."""
        stem = stem_of(name)
        if f"{stem}.qweight" not in present:
            return None
        outputs, inputs = shape
        group = group_of(self.group_size, inputs)
        groups, words = -(-inputs // group), num_words(outputs, _BITS)
        tensors = {
            "codes": ExpectedTensor(f"{stem}.qweight", (inputs, words), INT32),
            "zeros": ExpectedTensor(f"{stem}.qzeros", (groups, words), INT32),
            "scales": ExpectedTensor(f"{stem}.scales", (groups, outputs), FLOATS),
        }
        return Recipe(tensors, partial(_make, outputs, group))


def read_awq(reader: ConfigReader) -> Awq:
    """Read a ``quantization_config`` of AWQ. Raises ModelLoadError."""
    reader.require("quant_method", "awq")
    reader.require("bits", _BITS)
    reader.require("w_bit", _BITS)
    reader.require("zero_point", True)
    for key in ("version", "format", "checkpoint_format"):
        version = reader.text(key, "gemm").lower()
        if version != "gemm":
            raise reader.error(key, f"is {version[:80]!r}; only 'gemm' is supported")
    reader.require("method", "awq")
    reader.require("pack_dtype", "int32")
    for key in (*HISTORY.split(), *_HISTORY.split()):
        reader.ignore(key)
    return Awq(read_group_size(reader, "group_size", "q_group_size"))


def _make(outputs: int, group: int, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    codes = _unpack_nibbles(tensors["codes"], outputs).T.contiguous()
    zeros = _unpack_nibbles(tensors["zeros"], outputs).T
    return integer_weight(codes, _BITS, tensors["scales"].T.contiguous(), zeros, group)


def _unpack_nibbles(words: torch.Tensor, outputs: int) -> torch.Tensor:
    """[rows, words] int32 -> [rows, outputs] uint8."""
    nibbles = unpack_words(words, _BITS, 8 * words.shape[1])
    return nibbles.unflatten(1, (-1, 8))[:, :, list(_NIBBLE_ORDER)].flatten(1)[:, :outputs]
