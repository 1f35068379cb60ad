"""Step 3.5 and 3.7: gated heads, more of them in windowed layers, experts by corrected sigmoids."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.multimodal import text_part
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import (
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    read_gate_limits,
    set_aliases,
    with_checked_experts,
)
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, HeadSpec, LayerSpec, MoeSpec, NormSpec

_ALIASES = {
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "num_attention_groups": "num_key_value_heads",
    "share_expert_dims": "share_expert_dim",
}
# What the published configs say of all models of this kind.
_FIXED: dict[str, Any] = {
    **{"att_impl_type": "GQA", "moe_every_n_layer": 1, "moe_router_activation": "sigmoid"},
    **{"norm_expert_weight": True, "use_head_wise_attn_gate": True, "use_moe": True},
    **{"use_moe_router_bias": True, "use_qk_norm": True, "yarn_only_types": ["full_attention"]},
    **{"zero_centered": True, "attention_bias": False, "mlp_bias": False},
}
# A repeated number, and the layers of multi-token prediction.
_UNUSED = ("max_seq_len", "mtp_layer_types", "mtp_mlp_layer_types")
# Of images, which are not supported.
_SEEING = (
    *("projector_bias", "understand_projector_stride", "image_token_len", "patch_token_len"),
    *("im_start_token", "im_end_token", "im_patch_token", "vision_select_layer"),
)


def step3p5(reader: ConfigReader) -> DecoderSpec:
    """Step 3.5 Flash, and the text model of Step 3.7 Flash (StepFun)."""
    ignore_router_training(reader)
    set_aliases(reader, _ALIASES)
    for key, value in _FIXED.items():
        reader.require(key, value)
    for key in _UNUSED:
        reader.ignore(key)
    reader.refuse("use_rope_layers", "is set, which is not supported")
    head_dim = reader.count("head_dim", 128)
    trained = reader.count("max_position_embeddings", 128_000)
    kinds = layer_types(reader, num_layers(reader)) or ["full_attention"] * num_layers(reader)
    full, local = _ropes(reader, kinds, trained, head_dim)
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5), offset=1.0),
        head_dim=head_dim,
        max_positions=trained,
        rope=full,
        local_rope=local,
        qk_norm=True,
        attention_gate=True,
        separate_gates=True,
        gates_by_head=True,
        attention_scale=reader.number("query_pre_attn_scalar", float(head_dim)) ** -0.5,
        layers=_layers(reader, kinds, head_dim),
        moe=MoeSpec(
            num_experts=reader.count("n_routed_experts", 288),
            top_k=reader.count("num_experts_per_tok", 8),
            intermediate_size=reader.count("moe_intermediate_size", 1280),
            normalised=True,
            scoring="sigmoid",
            has_correction_bias=True,
            router_in_float32=reader.flag("need_fp32_gate"),
            scale=reader.number("moe_router_scaling_factor", 1.0),
            shared_intermediate_size=reader.count("share_expert_dim", 1280),
            shared_width_key="share_expert_dim",
        ),
        num_unread_layers=reader.non_negative("num_nextn_predict_layers", 0),
    )
    return with_checked_experts(reader, spec)


def step3p7(reader: ConfigReader) -> DecoderSpec:
    """Step 3.7 Flash."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "step3p5")
        text.set_defaults({"model_type": "step3p5"})
        return step3p5(text)

    reader.set_defaults({"tie_word_embeddings": False})
    return dataclasses.replace(text_part(reader, read, _SEEING), naming="step3p5")


def _ropes(
    reader: ConfigReader, kinds: list[str], trained: int, head_dim: int
) -> tuple[RopeSpec, RopeSpec]:
    """Return the ropes of full attention and of windowed layers.

    Published configs list the base and the rotated share of each layer.
    """
    theta, count = 10_000.0, len(kinds)
    if "rope_parameters" not in reader:
        is_listed = reader.is_list("rope_theta")
        bases = reader.list_of_length("rope_theta", count) if is_listed else None
        bases = bases or [reader.number("rope_theta", theta)] * count
        shares = reader.list_of_length("partial_rotary_factors", count) or [1.0] * count
        sections: dict[str, dict[str, Any]] = {}
        for kind, base, share in zip(kinds, bases, shares, strict=True):
            own = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": share}
            if sections.setdefault(kind, own) != own:
                raise reader.error("rope_theta", f"differs among layers of {kind}")
        if "rope_scaling" in reader and "full_attention" in sections:
            sections["full_attention"] |= reader.mapping("rope_scaling")
        reader = ConfigReader({"rope_parameters": sections})
    return read_ropes_by_layer(
        reader, theta=theta, local_theta=theta, trained=trained, head_dim=head_dim
    )


def _layers(reader: ConfigReader, kinds: list[str], head_dim: int) -> tuple[LayerSpec, ...]:
    count, window = len(kinds), reader.optional_count("sliding_window")
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", 8)
    windowed_heads = _num_windowed_heads(reader, num_heads, num_kv_heads, head_dim)
    other = HeadSpec(num_kv_heads, head_dim, num_heads=windowed_heads)
    overrides = reader.mapping("per_layer_config")
    for i, kind in enumerate(kinds):
        expected = windowed_heads if kind == "sliding_attention" else num_heads
        if overrides.get(str(i), {"num_attention_heads": expected}) != {
            "num_attention_heads": expected
        }:
            raise reader.error("per_layer_config", f"of layer {i} is not supported")
    limits = read_gate_limits(reader, "swiglu_limits", count)
    shared = read_gate_limits(reader, "swiglu_limits_shared", count)
    return tuple(
        LayerSpec(
            window if kind == "sliding_attention" else None,
            local_rope=kind == "sliding_attention",
            experts=has_experts,
            heads=other if kind == "sliding_attention" and windowed_heads != num_heads else None,
            gate_limit=shared[i],
            expert_gate_limit=limits[i],
        )
        for i, (kind, has_experts) in enumerate(zip(kinds, _sparse(reader), strict=True))
    )


def _num_windowed_heads(
    reader: ConfigReader, num_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """Return the query heads of windowed layers, in either spelling."""
    published, found = reader.section("attention_other_setting"), num_heads
    if published is not None:
        found = published.count("num_attention_heads", num_heads)
        published.require("attention_type", "sliding_attention")
        published.require("num_attention_groups", num_kv_heads)
        for key in ("head_dim", "true_head_dim"):
            published.require(key, head_dim)
        published.finish()
    found = reader.count("num_sliding_attention_heads", found)
    if found % num_kv_heads:
        key = "num_sliding_attention_heads"
        raise reader.error(key, f"({found}) does not go with {num_kv_heads} KV heads")
    return found


def _sparse(reader: ConfigReader) -> list[bool]:
    """Return which layers have experts: those listed, or all but the first three."""
    count = num_layers(reader)
    kinds = reader.list_of_length("mlp_layer_types", count)
    if kinds is not None:
        if any(kind not in ("dense", "sparse") for kind in kinds):
            raise reader.error("mlp_layer_types", "must name 'dense' or 'sparse' for each layer")
        reader.ignore("moe_layers_enum")
        return [kind == "sparse" for kind in kinds]
    if "moe_layers_enum" not in reader:
        return [i >= 3 for i in range(count)]
    if reader.is_list("moe_layers_enum"):
        listed = reader.indices("moe_layers_enum")
        return [i in listed for i in range(count)]
    numbers = reader.text("moe_layers_enum").split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise reader.error("moe_layers_enum", "must be numbers of layers, between commas")
    chosen = {int(number) for number in numbers}
    return [i in chosen for i in range(count)]


_DIFFERENCES = (
    "gated attention, QK norms, windows with their own rope and more heads, partial rope, experts "
    "by corrected sigmoids, a shared expert, clamped SwiGLU in some layers"
)
FAMILIES: dict[str, Family] = {
    "step3p5": Family(step3p5, "Step 3.5 Flash", _DIFFERENCES, has_remote_code=True),
    "step3p7": Family(step3p7, "Step 3.7 Flash", "as `step3p5`; text only", has_remote_code=True),
}
