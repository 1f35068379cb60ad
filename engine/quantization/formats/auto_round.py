"""Checkpoints of AutoRound (Cheng et al. 2023), in the layouts of GPTQ or AWQ.

``packing_format`` names the layout: "auto_round:auto_gptq" is GPTQ's, with zeros stored less one
and without ``g_idx``, and "auto_round:auto_awq" is AWQ's.
"""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import QuantFormat
from engine.quantization.formats.awq import Awq
from engine.quantization.formats.gptq import BITS, Gptq
from engine.quantization.formats.shared import read_group_size

_LAYOUTS = ("auto_gptq", "gptq", "auto_awq", "awq")
# How the codes were found; the tensors show which modules are dense.
_HISTORY = """
    amp autoround_version backend batch_size block_name_to_quantize data_type dataset
    enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps
    iters low_gpu_mem_usage lr minmax_lr model_free nsamples quant_block_list quant_method
    scale_dtype seqlen static_groups super_bits super_group_size sym to_quant_block_names
"""
_DENSE_BITS = 16


def read_auto_round(reader: ConfigReader) -> QuantFormat:
    """Read a ``quantization_config`` of AutoRound. Raises ModelLoadError."""
    bits, group_size = reader.count("bits", 4), read_group_size(reader, "group_size")
    packing = reader.text("packing_format", "auto_round:auto_gptq")
    layout = packing.removeprefix("auto_round:")
    if layout not in _LAYOUTS:
        known = ", ".join(f"auto_round:{name}" for name in _LAYOUTS)
        raise reader.error("packing_format", f"is {packing[:80]!r}; known: {known}")
    if reader.count("act_bits", _DENSE_BITS) < _DENSE_BITS:
        raise reader.error("act_bits", "rounds activations, which is not supported")
    reader.require("data_type", "int")
    _check_modules(reader, bits, group_size)
    for key in _HISTORY.split():
        reader.ignore(key)
    if layout.endswith("awq"):
        reader.require("bits", 4)
        return Awq(group_size)
    if bits not in BITS:
        raise reader.error("bits", f"is {bits}; its layout has {', '.join(map(str, BITS))}")
    return Gptq(bits, group_size, zero_offset=1)


def _check_modules(reader: ConfigReader, bits: int, group_size: int | None) -> None:
    """Refuse modules with a number of bits of their own, unless they are dense."""
    for module, own in reader.mapping("extra_config").items():
        held = own if isinstance(own, dict) else {}
        own_bits, own_group = held.get("bits", bits), held.get("group_size", group_size or -1)
        if own_bits == _DENSE_BITS or (own_bits, own_group) == (bits, group_size or -1):
            continue
        raise reader.error("extra_config", f"has {own!r:.60} for {module[:80]!r}: not supported")
