"""Models with Mamba-1's layers (Gu & Dao 2023): Mamba, Falcon-Mamba, Jamba."""

from __future__ import annotations

from typing import Literal

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.mamba2 import MAX_POSITIONS
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    read_dtype,
    with_checked_experts,
)
from engine.models.recurrence import ChannelScanSpec
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

# Keys of initialisation, of ways to compute the same, and a duplicate. ``residual_in_fp32`` affects
# rounding only.
_UNUSED = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "d_inner", "d_model"),
    *("time_step_init_scheme", "rescale_prenorm_residual", "residual_in_fp32", "use_mambapy"),
    *("use_associative_scan", "use_falcon_mambapy", "n_layer", "fused_add_norm"),
    "pad_vocab_size_multiple",
)
_JAMBA_UNUSED = (
    *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep"),
    "calc_logits_for_entire_prompt",
)


def mamba(reader: ConfigReader) -> DecoderSpec:
    """Mamba 130M to 2.8B in Hugging Face's format."""
    return _mamba(reader, "none", 1e-6)


def falcon_mamba(reader: ConfigReader) -> DecoderSpec:
    """Falcon-Mamba 7B: norms without weights of time steps, B and C."""
    return _mamba(reader, "weightless", reader.number("mixer_rms_eps", 1e-6))


def jamba(reader: ConfigReader) -> DecoderSpec:
    """Jamba: attention without rope in one layer of eight, experts in some."""
    for key in _JAMBA_UNUSED:
        reader.ignore(key)
    ignore_router_training(reader)
    reader.require("mamba_inner_layernorms", True)
    reader.refuse("sliding_window", "is set, which is not supported")
    reader.require("hidden_act", "silu")
    hidden_size, eps = reader.count("hidden_size", 4096), reader.number("rms_norm_eps", 1e-6)
    expand = reader.count("mamba_expand", 2)
    state_space = ChannelScanSpec(
        channels=expand * hidden_size,
        state_size=reader.count("mamba_d_state", 16),
        step_rank=_step_rank(reader, "mamba_dt_rank", hidden_size),
        conv_width=_conv_width(reader, "mamba_d_conv"),
        conv_bias=reader.flag("mamba_conv_bias", True),
        bias=reader.flag("mamba_proj_bias"),
        norms="learned",
        norm_eps=eps,
        width_key="mamba_expand * hidden_size",
    )
    experts_key = "num_local_experts" if "num_local_experts" in reader else "num_experts"
    num_experts, top_k = reader.count(experts_key, 16), reader.count("num_experts_per_tok", 2)
    layers = _jamba_layers(reader, has_experts=num_experts > 1)
    inner = reader.count("intermediate_size", 14_336)
    moe = MoeSpec(num_experts, top_k, inner, normalised=False, width_key="intermediate_size")
    has_moe = any(layer.experts for layer in layers)
    spec = read_decoder(
        reader,
        norm=NormSpec(eps),
        max_positions=262_144,
        rope=RopeSpec(10_000.0),  # of no layer; None would be learned positions
        layers=layers,
        moe=moe if has_moe else None,
        recurrence=state_space,
    )
    return with_checked_experts(reader, spec) if has_moe else spec


def _jamba_layers(reader: ConfigReader, *, has_experts: bool) -> tuple[LayerSpec, ...]:
    attending = _period(reader, "attn_layer", 8, 4)
    mixing = _period(reader, "expert_layer", 2, 1)
    layers = tuple(
        LayerSpec(
            recurrent=i % attending[0] != attending[1],
            rope=False,
            experts=has_experts and i % mixing[0] == mixing[1],
        )
        for i in range(num_layers(reader))
    )
    if all(layer.recurrent for layer in layers):
        raise reader.error("attn_layer_offset", "leaves no layer with attention")
    return layers


def _period(reader: ConfigReader, name: str, period: int, offset: int) -> tuple[int, int]:
    """Return every which layer is of a kind, and the first of these."""
    period = reader.count(f"{name}_period", period)
    offset = reader.non_negative(f"{name}_offset", offset)
    if offset >= period:
        raise reader.error(f"{name}_offset", f"must be below '{name}_period', {period}")
    return period, offset


def _mamba(
    reader: ConfigReader, norms: Literal["none", "weightless"], norm_eps: float
) -> DecoderSpec:
    for key in _UNUSED:
        reader.ignore(key)
    reader.require("hidden_act", "silu")
    reader.require("rms_norm", True)
    reader.refuse("ssm_cfg", "is set, which is not supported")
    hidden_size = reader.count("hidden_size", 768)
    channels = reader.count("expand", 2) * hidden_size
    channels = reader.count("intermediate_size", channels)
    state_space = ChannelScanSpec(
        channels=channels,
        state_size=reader.count("state_size", 16),
        step_rank=_step_rank(reader, "time_step_rank", hidden_size),
        conv_width=_conv_width(reader, "conv_kernel"),
        conv_bias=reader.flag("use_conv_bias", True),
        bias=reader.flag("use_bias"),
        norms=norms,
        norm_eps=norm_eps,
    )
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size", 50_280),
        hidden_size=hidden_size,
        intermediate_size=channels,
        # No layer has such heads.
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        norm=NormSpec(reader.number("layer_norm_epsilon", 1e-5)),
        rope=RopeSpec(10_000.0),  # None would be learned positions
        layers=(LayerSpec(recurrent=True, rope=False, mlp=False),) * num_layers(reader),
        recurrence=state_space,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def _step_rank(reader: ConfigReader, key: str, hidden_size: int) -> int:
    """Return the rank that time steps are made from; "auto" is a sixteenth of the width."""
    if key not in reader or reader.has_value(key, "auto"):
        return -(-hidden_size // 16)
    return reader.count(key)


def _conv_width(reader: ConfigReader, key: str) -> int:
    width = reader.count(key, 4)
    if width < 2:
        raise reader.error(key, "must be at least 2")
    return width


FAMILIES: dict[str, Family] = {
    "falcon_mamba": Family(falcon_mamba, "Falcon-Mamba 7B", "as `mamba`; more norms"),
    "jamba": Family(
        jamba,
        "Jamba 1.5 to 1.7 Mini and Large, Jamba Reasoning 3B",
        "selective state spaces (Mamba-1) in most layers, no rope, experts in some",
        has_remote_code=True,
    ),
    "mamba": Family(mamba, "Mamba 130M to 2.8B", "as `mamba2`; states of channels"),
}
