"""DBRX: clipped queries, keys and values, layer norms, sixteen experts in all layers."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_rope
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    set_aliases,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

_ALIASES = {
    **{"d_model": "hidden_size", "n_heads": "num_attention_heads"},
    **{"n_layers": "num_hidden_layers", "max_seq_len": "max_position_embeddings"},
}
_DEFAULTS = {
    **{"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24},
    **{"max_position_embeddings": 2048},
}


def dbrx(reader: ConfigReader) -> DecoderSpec:
    """DBRX 132B-A36B (Databricks)."""
    ignore_router_training(reader)
    set_aliases(reader, _ALIASES)
    reader.set_defaults(_DEFAULTS)
    reader.require("tie_word_embeddings", False)
    reader.ignore("emb_pdrop")
    attention = reader.section("attn_config") or ConfigReader({}, "config.json, 'attn_config'")
    reader.set_defaults({"num_key_value_heads": attention.count("kv_n_heads", 1)})
    clip = attention.optional_number("clip_qkv")
    attention.ignore("attn_pdrop")
    head_dim = reader.count("hidden_size") // reader.count("num_attention_heads")
    rope = read_rope(
        reader,
        theta=attention.number("rope_theta", 10_000.0, above=1.0),
        trained=reader.count("max_position_embeddings"),
        head_dim=head_dim,
    )
    attention.finish()
    moe = _experts(reader)
    spec = read_decoder(
        reader,
        norm=NormSpec(1e-5, "layer"),
        head_dim=head_dim,
        rope=rope,
        qkv_clip=clip,
        intermediate_size=moe.intermediate_size,  # no layer has an MLP
        layers=(LayerSpec(experts=True),) * num_layers(reader),
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def _experts(reader: ConfigReader) -> MoeSpec:
    section = reader.section("ffn_config") or ConfigReader({}, "config.json, 'ffn_config'")
    activation = section.mapping("ffn_act_fn") or {"name": "silu"}
    if activation != {"name": "silu"}:
        raise section.error("ffn_act_fn", f"is {activation!r:.80}, which is not supported")
    for key in ("moe_jitter_eps", "moe_loss_weight"):
        section.ignore(key)
    section.require("hidden_size", reader.count("hidden_size"))
    # The norm of a token's weights that is made one; a sum is the first.
    section.set_defaults({"moe_normalize_expert_weights": 1.0})
    section.require("moe_normalize_expert_weights", 1.0)
    moe = MoeSpec(
        num_experts=section.count("moe_num_experts", 4),
        top_k=section.count("moe_top_k", 1),
        intermediate_size=section.count("ffn_hidden_size", 3584),
        width_key="ffn_hidden_size",
        normalised="moe_normalize_expert_weights" in section,
    )
    section.finish()
    return moe


FAMILIES: dict[str, Family] = {
    "dbrx": Family(
        dbrx,
        "DBRX 132B-A36B",
        "layer norms, clipped queries, keys and values, experts",
        has_remote_code=True,
    ),
}
