"""Hunyuan: query and key norms after rope; routed experts and a shared one."""

from __future__ import annotations

from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_rope
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

# Exporter keys about tokens other than the end, and about models other than the text model.
_UNUSED = (
    *("eod_token_id", "sep_token_id", "im_start_id", "im_end_id", "im_newline_id", "pad_id"),
    *("text_start_id", "text_end_id", "image_token_id", "mask_init_id", "org_vocab_size"),
    *("num_media_embeds", "class_num", "pool_type", "enable_lm_head_fp32", "cla_share_factor"),
)


def hunyuan_dense(reader: ConfigReader) -> DecoderSpec:
    """Hunyuan 0.5B to 7B and Hunyuan-MT."""
    return _hunyuan(reader)


def hunyuan_moe(reader: ConfigReader) -> DecoderSpec:
    """Hunyuan-A13B."""
    ignore_router_training(reader)
    inner = reader.count("intermediate_size")
    moe = MoeSpec(
        num_experts=reader.count("num_experts"),
        top_k=_uniform_count(reader, "moe_topk", 1),
        intermediate_size=_uniform_count(reader, "moe_intermediate_size", inner),
        normalised=True,
        router_in_float32=True,
        shared_intermediate_size=inner * _uniform_count(reader, "num_shared_expert", 1),
        shared_width_key="num_shared_expert * intermediate_size",
    )
    reader.require("use_mixed_mlp_moe", True)
    reader.refuse("moe_layer_num_skipped", "is not 0, which is not supported")
    reader.refuse("group_limited_greedy", "is true, which is not supported")
    for key in ("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"):
        reader.ignore(key)  # training only
    layers = (LayerSpec(experts=True),) * num_layers(reader)
    return with_checked_experts(reader, _hunyuan(reader, moe=moe, layers=layers))


def _hunyuan(reader: ConfigReader, **fields: Any) -> DecoderSpec:
    for key in _UNUSED:
        reader.ignore(key)
    reader.require("use_qk_norm", True)
    reader.require("norm_type", "rms")
    reader.require("use_rotary_pos_emb", True)
    for key in ("use_cla", "add_classification_head", "position_embedding_xdrope", "mlp_bias"):
        reader.refuse(key, "is true, which is not supported")
    heads = reader.count("hidden_size") // reader.count("num_attention_heads")
    head_dim = reader.count("head_dim", reader.count("attention_head_dim", heads))
    bias = reader.flag("attention_bias")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=head_dim,
        rope=_rope(reader, head_dim),
        qk_norm=True,
        qk_norm_after_rope=True,
        qkv_bias=bias,
        output_bias=bias,
        **fields,
    )


def _rope(reader: ConfigReader, head_dim: int) -> RopeSpec:
    """Read the rope; with ``alpha`` the base is ``theta * alpha ^ (d / (d - 2))``."""
    trained = reader.count("max_position_embeddings", 2048)
    section = reader.section("rope_parameters") or reader.section("rope_scaling")
    if section is None or "alpha" not in section:
        return read_rope(reader, theta=10_000.0, trained=trained, head_dim=head_dim)
    theta = section.number("rope_theta", reader.number("rope_theta", 10_000.0, above=1.0))
    alpha = section.number("alpha")
    return RopeSpec(theta * alpha ** (head_dim / max(head_dim - 2, 1)))


def _uniform_count(reader: ConfigReader, key: str, default: int) -> int:
    """Return a number that may be given as a list with the same value for each layer."""
    listed = reader.list_of_length(key, num_layers(reader)) if reader.is_list(key) else None
    if listed is None:
        return reader.count(key, default)
    if type(listed[0]) is not int or listed[0] < 1 or any(n != listed[0] for n in listed):
        raise reader.error(key, "differs between layers, which is not supported")
    return listed[0]


FAMILIES: dict[str, Family] = {
    "hunyuan_v1_dense": Family(
        hunyuan_dense, "Hunyuan 0.5B to 7B, Hunyuan-MT", "QK norms after rope"
    ),
    "hunyuan_v1_moe": Family(
        hunyuan_moe,
        "Hunyuan-A13B",
        "QK norms after rope, experts and a shared expert",
        has_remote_code=True,
    ),
}
