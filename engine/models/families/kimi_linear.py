"""Kimi Linear: delta rules with a decay per channel, and latent attention without rope."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import read_deepseek_v3_experts, read_latent_decoder
from engine.models.families.family import Family
from engine.models.families.shared import num_layers, set_aliases
from engine.models.recurrence import GatedDeltaSpec
from engine.models.rope_spec import ProportionalScaling, RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec

# Its names of what others have, too.
_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_shared_experts": "n_shared_experts",
}
_EXPERTS = {"moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_tok": 8}
_DEFAULTS = {**_EXPERTS, "n_shared_experts": 1, "max_position_embeddings": 1_048_576}


def kimi_linear(reader: ConfigReader) -> DecoderSpec:
    """Kimi Linear 48B-A3B (Kimi Team 2025)."""
    set_aliases(reader, _ALIASES)
    reader.set_defaults(_DEFAULTS)
    reader.require("mla_use_nope", True)
    reader.require("use_grouped_topk", True)
    reader.refuse("q_lora_rank", "is set, which is not supported")
    reader.refuse("attention_bias", "is true, which is not supported")
    reader.refuse("rope_scaling", "is set, which is not supported")
    reader.ignore("head_dim")  # of neither kind of layer
    eps = reader.number("rms_norm_eps", 1e-5)
    recurrence, attending = _recurrence(reader, eps)
    moe = read_deepseek_v3_experts(reader, scale=2.446)
    spec = read_latent_decoder(reader, moe, first_dense=1, interleaved=False)
    layers = tuple(
        LayerSpec(experts=layer.experts, recurrent=i not in attending, rope=i in attending)
        for i, layer in enumerate(spec.layers)
    )
    return dataclasses.replace(
        spec,
        layers=layers,
        recurrence=recurrence,
        norm=dataclasses.replace(spec.norm, eps=eps),
        # Turned by no angle at all.
        rope=RopeSpec(10_000.0, ProportionalScaling(0.0)),
        naming="",
    )


def _recurrence(reader: ConfigReader, eps: float) -> tuple[GatedDeltaSpec, frozenset[int]]:
    """Return the delta rule, and the numbers of the layers that attend instead."""
    count, section = num_layers(reader), reader.section("linear_attn_config")
    if section is None:
        heads, dim = reader.count("linear_num_heads", 32), reader.count("linear_head_dim", 128)
        width = reader.count("linear_conv_kernel_dim", 4)
        kinds = reader.list_of_length("layer_types", count) or [
            "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)
        ]
        known = ("full_attention", "linear_attention")
        if any(kind not in known for kind in kinds):
            raise reader.error("layer_types", f"must name {known[0]!r} or {known[1]!r}")
        attending = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    else:
        heads, dim = section.count("num_heads"), section.count("head_dim")
        width = section.count("short_conv_kernel_size", 4)
        attending, others = (
            frozenset(i - 1 for i in section.indices(key))  # counted from 1
            for key in ("full_attn_layers", "kda_layers")
        )
        if attending & others or attending | others != frozenset(range(count)):
            raise section.error("kda_layers", f"and 'full_attn_layers' must be the {count} layers")
        section.finish()
        for key in ("layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"):
            reader.ignore(key)
    if not attending or len(attending) == count:
        what = "attention" if not attending else "delta rule"
        raise reader.error("num_hidden_layers", f"has no {what}, which is not supported")
    if width < 2:
        raise reader.error("linear_conv_kernel_dim", "must be at least 2")
    spec = GatedDeltaSpec(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=width,
        norm_eps=eps,
        separate_projections=True,
        decays_channels=True,
        channel_rank=dim,
    )
    return spec, attending


FAMILIES: dict[str, Family] = {
    "kimi_linear": Family(
        kimi_linear,
        "Kimi Linear 48B-A3B",
        "gated delta rule with a decay per channel, latent attention without rope, experts",
        has_remote_code=True,
    ),
}
