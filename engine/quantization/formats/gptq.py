"""GPTQ checkpoints (Frantar et al. 2022), as written by AutoGPTQ and GPTQModel.

    X.qweight [inputs * bits / 32, outputs] int32   codes, packed along the inputs
    X.qzeros  [groups, outputs * bits / 32] int32   zeros, packed along the outputs
    X.scales  [groups, outputs]
    X.g_idx   [inputs] int32                        the group of each input

With ``checkpoint_format`` "gptq" zeros are stored less one (0 as the largest code), with "gptq_v2"
as they are. With
``desc_act`` the groups follow another order of the inputs, given by ``g_idx``.
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
from engine.quantization.formats.shared import (
    FLOATS,
    INT32,
    group_of,
    read_group_size,
    stem_of,
)
from kernels.packed import PackedWeight

BITS = (2, 3, 4, 8)
# How the codes were found, or how others compute with them; nothing about their meaning.
HISTORY = """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_percent
    damp_auto_increment dataset desc_act device disable_exllama exllama_config fail_safe hyb_act
    lm_head max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize mse offload_to_disk
    offload_to_disk_path pad_token_id pack_impl quantizer static_groups sym tokenizer
    true_sequential use_cuda_fp16 use_exllama
"""


@dataclass(frozen=True, slots=True)
class Gptq:
    """See ``engine.models.packed_tensors.QuantFormat``."""

    bits: int
    group_size: int | None  # None: all inputs are one group
    zero_offset: int  # to be added to stored zeros

    @property
    def name(self) -> str:
        """See ``QuantFormat``."""
        return f"GPTQ, {self.bits} bits"

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """See ``QuantFormat``: matrices with ``qweight`` are quantised."""
        stem = stem_of(name)
        if f"{stem}.qweight" not in present:
            return None
        outputs, inputs = shape
        group = group_of(self.group_size, inputs)
        groups = -(-inputs // group)
        tensors = {
            "codes": ExpectedTensor(
                f"{stem}.qweight", (num_words(inputs, self.bits), outputs), INT32
            ),
            "zeros": ExpectedTensor(
                f"{stem}.qzeros", (groups, num_words(outputs, self.bits)), INT32
            ),
            "scales": ExpectedTensor(f"{stem}.scales", (groups, outputs), FLOATS),
        }
        if f"{stem}.g_idx" in present:
            tensors["groups"] = ExpectedTensor(f"{stem}.g_idx", (inputs,), INT32)
        return Recipe(tensors, partial(self._make, shape, group))

    def _make(
        self, shape: tuple[int, int], group: int, tensors: Mapping[str, torch.Tensor]
    ) -> PackedWeight:
        outputs, inputs = shape
        codes = unpack_words(tensors["codes"].T, self.bits, inputs)
        stored = unpack_words(tensors["zeros"], self.bits, outputs).T.to(torch.int16)
        zeros = (stored + self.zero_offset) % (1 << self.bits)
        return integer_weight(
            codes,
            self.bits,
            tensors["scales"].T.contiguous(),
            zeros,
            group,
            tensors.get("groups"),
        )


def read_gptq(reader: ConfigReader) -> Gptq:
    """Read a ``quantization_config`` of GPTQ. Raises ModelLoadError."""
    bits = reader.count("bits")
    if bits not in BITS:
        raise reader.error("bits", f"is {bits}; GPTQ has 2, 3, 4 and 8")
    stored = reader.text("checkpoint_format", reader.text("format", "gptq"))
    if stored not in ("gptq", "gptq_v2"):
        raise reader.error("checkpoint_format", f"is {stored!r:.80}; known: 'gptq', 'gptq_v2'")
    reader.require("quant_method", "gptq")
    reader.require("method", "gptq")
    reader.require("pack_dtype", "int32")
    if not all(_is_harmless(*rule) for rule in reader.mapping("dynamic").items()):
        raise reader.error("dynamic", "sets other bits for some layers, which is not supported")
    reader.refuse("is_marlin_format", "lays codes out for one kernel of another engine")
    for key in HISTORY.split():
        reader.ignore(key)
    return Gptq(bits, read_group_size(reader, "group_size"), int(stored == "gptq"))


def _is_harmless(pattern: str, changes: object) -> bool:
    """Return whether a rule for some modules changes nothing, or says that they are dense, as the
    tensors show, too."""
    return pattern.startswith("-:") or not changes
