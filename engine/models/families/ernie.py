"""ERNIE 4.5, text only: interleaved rope, softmax experts with corrected choice."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
)
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

_MAX_POSITIONS = 131_072


def ernie4_5(reader: ConfigReader, mrope: MropeSpec | None = None) -> DecoderSpec:
    """ERNIE 4.5, dense; with ``mrope`` the text model of PaddleOCR-VL."""
    bias = reader.flag("use_bias")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=128,
        theta=500_000.0,
        interleaved=mrope is None,
        tied=True,
        max_positions=_MAX_POSITIONS,
        mrope=mrope,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def ernie4_5_moe(reader: ConfigReader) -> DecoderSpec:
    """ERNIE 4.5 with experts: 21B-A3B and 300B-A47B."""
    ignore_router_training(reader)
    reader.refuse("use_bias", "is true, which is not supported")
    reader.require("moe_gate", "topk")
    reader.require("moe_use_aux_free", True)
    # Capacities apply only in training, multi-token prediction layers are not read, and sums of
    # weights never get near the minimum divisor.
    for key in ("moe_capacity", "num_nextn_predict_layers", "moe_norm_min"):
        reader.ignore(key)
    inner = reader.count("moe_intermediate_size", 1536)
    moe = MoeSpec(
        num_experts=reader.count("moe_num_experts", 64),
        top_k=reader.count("moe_k", 6),
        intermediate_size=inner,
        normalised=True,
        has_correction_bias=True,
        router_in_float32=True,
        shared_intermediate_size=inner * reader.non_negative("moe_num_shared_experts", 2),
        shared_width_key="moe_num_shared_experts * moe_intermediate_size",
    )
    if moe.top_k > moe.num_experts:
        raise reader.error("moe_k", f"exceeds the {moe.num_experts} experts")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        theta=500_000.0,
        interleaved=True,
        tied=True,
        max_positions=_MAX_POSITIONS,
        moe=moe,
        layers=_layers(reader),
    )


def _layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return layers with experts in every ``moe_layer_interval``-th one of a range."""
    count = num_layers(reader)
    begin = reader.non_negative("moe_layer_start_index", 1)
    end = count - 1
    if not reader.has_value("moe_layer_end_index", -1):
        end = reader.non_negative("moe_layer_end_index", end)
    interval = reader.count("moe_layer_interval", 1)
    return tuple(
        LayerSpec(experts=(i + 1) % interval == 0 and begin <= i <= end) for i in range(count)
    )


FAMILIES: dict[str, Family] = {
    "ernie4_5": Family(ernie4_5, "ERNIE 4.5, dense", "interleaved rope", has_remote_code=True),
    "ernie4_5_moe": Family(
        ernie4_5_moe,
        "ERNIE 4.5 21B-A3B and 300B-A47B",
        "interleaved rope, experts by corrected softmaxes, shared experts",
        has_remote_code=True,
    ),
}
