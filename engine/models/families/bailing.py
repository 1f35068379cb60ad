"""Ling 3: delta rules with a bounded decay per channel, and latent attention with gated heads."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import read_deepseek_v3_experts, read_latent_decoder
from engine.models.families.family import Family
from engine.models.families.shared import num_layers, read_gate_limits, set_aliases
from engine.models.recurrence import GatedDeltaSpec
from engine.models.spec import DecoderSpec

# Its names of what others have, too.
_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_shared_experts": "n_shared_experts",
}
_DEFAULTS = {
    **{"moe_intermediate_size": 768, "num_experts": 512, "num_experts_per_tok": 8},
    **{"n_shared_experts": 1, "max_position_embeddings": 262_144, "rope_theta": 6_000_000.0},
}


def bailing_hybrid(reader: ConfigReader) -> DecoderSpec:
    """Ling 3.0 Flash and relatives (inclusionAI)."""
    set_aliases(reader, _ALIASES)
    reader.set_defaults(_DEFAULTS)
    reader.refuse("q_lora_rank", "is set, which is not supported")
    reader.refuse("attention_bias", "is true, which is not supported")
    reader.ignore("mtp_loss_scaling_factor")
    reader.drop("partial_rotary_factor")  # a share of ``head_dim``: all ``qk_rope_head_dim`` turn
    recurrence, attending = _recurrence(reader)
    moe = read_deepseek_v3_experts(reader, groups=(8, 4), scale=2.5)
    spec = read_latent_decoder(reader, moe, first_dense=2, interleaved=True)
    # In the published code; Hugging Face's knows no limits.
    limits = read_gate_limits(reader, "expert_swiglu_limit_list", len(spec.layers))
    shared = read_gate_limits(reader, "share_expert_swiglu_limit_list", len(spec.layers))
    layers = (
        dataclasses.replace(
            layer,
            recurrent=i not in attending,
            gate_limit=shared[i] if layer.experts else limits[i],
            expert_gate_limit=limits[i],
        )
        for i, layer in enumerate(spec.layers)
    )
    return dataclasses.replace(
        spec,
        layers=tuple(layers),
        recurrence=recurrence,
        attention_gate=True,
        separate_gates=True,
        gates_by_head=True,
        naming="",
        num_draft_layers=0,
        num_unread_layers=spec.num_draft_layers,
    )


def _recurrence(reader: ConfigReader) -> tuple[GatedDeltaSpec, frozenset[int]]:
    """Return the delta rule, and the numbers of the layers that attend instead."""
    count, period = num_layers(reader), reader.count("layer_group_size", 6)
    kinds = reader.list_of_length("layer_types", count) or [
        "full_attention" if (i + 1) % period == 0 else "linear_attention" for i in range(count)
    ]
    known = ("full_attention", "linear_attention")
    if any(kind not in known for kind in kinds):
        raise reader.error("layer_types", f"must name {known[0]!r} or {known[1]!r}")
    attending = frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if not attending or len(attending) == count:
        what = "attention" if not attending else "delta rule"
        raise reader.error("num_hidden_layers", f"has no {what}, which is not supported")
    heads = reader.count("linear_num_heads", reader.count("num_attention_heads"))
    # Exports that have both mean the rotary dimensions by ``head_dim``.
    dim = reader.count("linear_head_dim", reader.count("head_dim", 128))
    width = reader.count("linear_conv_kernel_dim", reader.count("short_conv_kernel_size", 4))
    if width < 2:
        raise reader.error("short_conv_kernel_size", "must be at least 2")
    least = reader.number("kda_lower_bound", -5.0, above=-1e6)
    if least >= 0:
        raise reader.error("kda_lower_bound", f"is {least:g}; logarithms of decays are negative")
    spec = GatedDeltaSpec(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=width,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        separate_projections=True,
        decays_channels=True,
        least_log_decay=least if reader.flag("kda_safe_gate", True) else 0.0,
    )
    return spec, attending


FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        bailing_hybrid,
        "Ling 3.0 Flash",
        "as `kimi_linear`; bounded decays, latent attention with rope and gated heads, experts in "
        "groups, clamped SwiGLU where its config says so",
        has_remote_code=True,
    ),
}
