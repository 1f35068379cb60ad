"""The supported formats, by the ``quant_method`` of a ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import QuantFormat
from engine.quantization.formats.auto_round import read_auto_round
from engine.quantization.formats.awq import read_awq
from engine.quantization.formats.bitsandbytes import read_bitsandbytes
from engine.quantization.formats.compressed import read_compressed_tensors
from engine.quantization.formats.fp8 import read_fp8
from engine.quantization.formats.gptq import read_gptq
from engine.quantization.formats.modelopt import read_modelopt
from engine.quantization.formats.mxfp4 import read_mxfp4


class FormatReader(NamedTuple):
    """The reader of a ``quant_method``, and which variants are supported."""

    read: Callable[[ConfigReader], QuantFormat]
    supported: str


FORMATS: dict[str, FormatReader] = {
    "auto-round": FormatReader(
        read_auto_round, "2, 3, 4 and 8 bits, in the layouts of GPTQ and AWQ, any group size"
    ),
    "awq": FormatReader(read_awq, "4 bits, the gemm layout, any group size"),
    "bitsandbytes": FormatReader(
        read_bitsandbytes, "NF4 and FP4, their scales quantised or not; INT8"
    ),
    "compressed-tensors": FormatReader(
        read_compressed_tensors,
        "W4A16 and W8A16 by channel or group, with zeros and act-order; W8A8; FP8 by tensor, "
        "channel, group or block; NVFP4 and MXFP4",
    ),
    "fbgemm_fp8": FormatReader(read_fp8, "FP8 by channel"),
    "fp8": FormatReader(read_fp8, "FP8 in blocks, by tensor, by channel; stacked experts"),
    "gptq": FormatReader(
        read_gptq, "2, 3, 4 and 8 bits, any group size, symmetric or not, act-order, v1 and v2"
    ),
    "modelopt": FormatReader(
        read_modelopt, "NVFP4, FP8 by tensor and channel, MXFP8, and several in one checkpoint"
    ),
    "mxfp4": FormatReader(read_mxfp4, "experts, as GPT-OSS has them"),
}


def read_format(config: dict[str, Any], where: str) -> QuantFormat:
    """Return the format that a ``quantization_config`` describes.

    Args:
        config: the section of config.json.
        where: its location, for errors.

    Raises:
        ModelLoadError: the method is unknown, a value is not supported, or a key is not understood;
            one line that names it.
    """
    reader = ConfigReader(config, where)
    method = reader.text("quant_method", "")
    if not method and ("load_in_4bit" in reader or "load_in_8bit" in reader):
        method = "bitsandbytes"  # older exports have no quant_method
    if not method and "quant_algo" in reader:
        method = "modelopt"  # some have none either
    found = FORMATS.get(method.replace("compressed_tensors", "compressed-tensors"))
    if found is None:
        known = ", ".join(FORMATS)
        raise ModelLoadError(
            f"{where}: quantisation {method[:80]!r} is not supported (known: {known})"
        )
    stored_as = found.read(reader)
    reader.finish()
    return stored_as
