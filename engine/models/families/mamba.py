"""Models with selective state space layers (Mamba-2): Granite 4, Bamba."""

from __future__ import annotations

import dataclasses
import math

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.recurrence import MambaSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

_RECURRENT = ("linear_attention", "mamba")  # Hugging Face's current and former names
_INFINITE = {"__float__": "Infinity"}  # JSON has no literal for it
_ATTENDING = ("full_attention", "attention")


def granitemoehybrid(reader: ConfigReader) -> DecoderSpec:
    """Granite 4 with state spaces, with or without experts.

    Published models have no position embedding.
    """
    for key in ("init_method", "initializer_range"):
        reader.ignore(key)
    reader.require("normalization_function", "rmsnorm")
    reader.require("mlp_bias", False)
    ignore_router_training(reader)
    num_experts = reader.non_negative("num_local_experts", 8)
    inner, shared = (
        reader.count("intermediate_size"),
        reader.count("shared_intermediate_size", 1024),
    )
    moe = None
    if num_experts:
        moe = MoeSpec(
            num_experts=num_experts,
            top_k=reader.count("num_experts_per_tok", 2),
            intermediate_size=inner,
            normalised=True,  # a softmax over the chosen experts only is the same
            shared_intermediate_size=shared,
            width_key="intermediate_size",
            shared_width_key="shared_intermediate_size",
        )
    else:
        reader.ignore("num_experts_per_tok")
    position = reader.text("position_embedding_type", "nope")
    if position not in ("rope", "nope"):
        raise reader.error("position_embedding_type", f"is {position[:80]!r}; known: nope, rope")
    layers = tuple(
        LayerSpec(recurrent=is_recurrent, rope=position == "rope", experts=moe is not None)
        for is_recurrent in _recurrent_layers(reader)
    )
    bias = reader.flag("attention_bias")
    spec = read_decoder(
        reader,
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        attention_scale=reader.number("attention_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
        layers=layers,
        moe=moe,
        recurrence=_mamba(reader, reader.number("rms_norm_eps", 1e-6), layers),
    )
    if moe is None:
        return dataclasses.replace(spec, intermediate_size=shared)
    return with_checked_experts(reader, spec)


def bamba(reader: ConfigReader) -> DecoderSpec:
    """Bamba: a few attention layers, with rotary positions on half of the head."""
    for key in ("num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types"):
        reader.ignore(key)
    count, attending = num_layers(reader), reader.indices("attn_layer_indices")
    eps, bias = reader.number("rms_norm_eps", 1e-5), reader.flag("attention_bias")
    kinds = _checked(reader, [i not in attending for i in range(count)])
    layers = tuple(LayerSpec(recurrent=kind) for kind in kinds)
    return read_decoder(
        reader,
        norm=NormSpec(eps),
        partial=0.5,
        max_positions=262_144,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        layers=layers,
        recurrence=_mamba(reader, eps, layers),
    )


def falcon_h1(reader: ConfigReader) -> DecoderSpec:
    """Falcon-H1: attention and a state space on the same norm in each layer; many multipliers.

    The multipliers become part of the weights they apply to.
    """
    for key in ("num_logits_to_keep", "mamba_use_mlp", "attn_layer_indices", "layers_block_type"):
        reader.ignore(key)
    reader.ignore("layer_types")  # all of them "hybrid"
    count, eps = num_layers(reader), reader.number("rms_norm_eps", 1e-5)
    bias, projectors = reader.flag("attention_bias"), reader.flag("projectors_bias")
    layers = (LayerSpec(hybrid=True),) * count
    recurrence = _mamba(reader, eps, layers, inner=reader.optional_count("mamba_d_ssm"))
    assert recurrence is not None
    if recurrence.bias != projectors:
        raise reader.error("projectors_bias", "differs from 'mamba_proj_bias'")
    has_norm = reader.flag("mamba_rms_norm")
    if has_norm:
        reader.require("mamba_norm_before_gate", False)
    else:
        reader.ignore("mamba_norm_before_gate")
    return read_decoder(
        reader,
        norm=NormSpec(eps),
        max_positions=8192,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        logit_scale=reader.number("lm_head_multiplier", 1.0),
        layers=layers,
        recurrence=dataclasses.replace(recurrence, has_norm=has_norm),
        multipliers=_multipliers(reader),
    )


def _multipliers(reader: ConfigReader) -> tuple[tuple[str, tuple[float, ...]], ...]:
    entering = reader.number("attention_in_multiplier", 1.0)
    key = reader.number("key_multiplier", 1.0)
    gate, down = _factors(reader, "mlp_multipliers", 2)
    runs = _factors(reader, "ssm_multipliers", 5)
    ssm_in = reader.number("ssm_in_multiplier", 1.0)
    return (
        ("attention_in", (entering,)),
        ("key", (entering * key,)),
        ("key_bias", (key,)),
        ("attention_out", (reader.number("attention_out_multiplier", 1.0),)),
        ("ssm_in", tuple(ssm_in * factor for factor in runs)),
        ("ssm_bias", runs),
        ("ssm_out", (reader.number("ssm_out_multiplier", 1.0),)),
        ("gate", (gate,)),
        ("down", (down,)),
    )


def _factors(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    if key not in reader:
        return (1.0,) * count
    factors = reader.numbers(key)
    if len(factors) != count:
        raise reader.error(key, f"must have {count} entries")
    return factors


def _mamba(
    reader: ConfigReader,
    eps: float,
    layers: tuple[LayerSpec, ...],
    *,
    inner: int | None = None,
) -> MambaSpec | None:
    """Return the recurrent layers' spec; None if there are none (Granite 4.0 Micro)."""
    if not any(layer.has_recurrence for layer in layers):
        for key in reader.names:
            if key.startswith("mamba_") or key == "time_step_limit":
                reader.ignore(key)
        return None
    reader.ignore("mamba_chunk_size")  # the result does not depend on it
    heads, groups = reader.count("mamba_n_heads", 128), reader.count("mamba_n_groups", 1)
    expanded = reader.count("mamba_expand", 2) * reader.count("hidden_size")
    inner = inner or expanded
    usual = max(inner // heads, 1)
    if reader.has_value("mamba_d_head", "auto"):
        head_dim = usual
    else:
        head_dim = reader.count("mamba_d_head", usual)
    if heads * head_dim != inner:
        raise reader.error("mamba_n_heads", f"of {head_dim} make no width of {inner}")
    if heads % groups:
        raise reader.error("mamba_n_groups", f"must divide the {heads} heads")
    width = reader.count("mamba_d_conv", 4)
    if width < 2:
        raise reader.error("mamba_d_conv", "must be at least 2")
    return MambaSpec(
        num_heads=heads,
        num_groups=groups,
        head_dim=head_dim,
        state_size=reader.count("mamba_d_state", 256),
        conv_width=width,
        norm_eps=eps,
        conv_bias=reader.flag("mamba_conv_bias", True),
        bias=reader.flag("mamba_proj_bias"),
        time_step_limit=_time_step_limit(reader),
    )


def read_state_space(
    reader: ConfigReader,
    eps: float,
    *,
    heads_key: str,
    head_dim_key: str,
    state_key: str,
    inner: int | None = None,
) -> MambaSpec:
    """Return the spec of recurrent layers whose config has the names of Mamba-2's own code.

    Args:
        reader: of the config.
        eps: of the norm.
        heads_key, head_dim_key, state_key: the names that families spell differently.
        inner: the width that all heads must have; None: whatever it is.

    Raises:
        ModelLoadError: a value is missing or does not fit the others.
    """
    heads, groups = reader.count(heads_key, 128), reader.count("n_groups", 8)
    head_dim = reader.count(head_dim_key, 64)
    if inner is not None and heads * head_dim != inner:
        raise reader.error(heads_key, f"of {head_dim} make no width of {inner}")
    if heads % groups:
        raise reader.error("n_groups", f"must divide the {heads} heads")
    width = reader.count("conv_kernel", 4)
    if width < 2:
        raise reader.error("conv_kernel", "must be at least 2")
    return MambaSpec(
        num_heads=heads,
        num_groups=groups,
        head_dim=head_dim,
        state_size=reader.count(state_key, 128),
        conv_width=width,
        norm_eps=eps,
        conv_bias=reader.flag("use_conv_bias", True),
        bias=reader.flag("use_bias"),
        time_step_limit=_time_step_limit(reader),
        heads_key=heads_key,
        groups_key="n_groups",
    )


def _time_step_limit(reader: ConfigReader) -> tuple[float, float]:
    """Return the minimum and maximum of ``time_step_limit``, where Hugging Face writes no limit."""
    limits = reader.list_of_length("time_step_limit", 2) or [0.0, _INFINITE]
    least, most = (math.inf if limit == _INFINITE else limit for limit in limits)
    is_known = all(type(limit) in (int, float) for limit in (least, most))
    if not is_known or not 0 <= least <= most:
        raise reader.error("time_step_limit", "must be two numbers, the smaller first")
    return float(least), float(most)


def _recurrent_layers(reader: ConfigReader) -> list[bool]:
    """Return which layers are state spaces: ``layer_types``, formerly ``layers_block_type``."""
    count = num_layers(reader)
    older = reader.list_of_length("layers_block_type", count)
    kinds = reader.list_of_length("layer_types", count) or older or [_RECURRENT[0]] * count
    for kind in kinds:
        if kind not in _RECURRENT + _ATTENDING:
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    return _checked(reader, [kind in _RECURRENT for kind in kinds])


def _checked(reader: ConfigReader, recurrent: list[bool]) -> list[bool]:
    if all(recurrent):
        raise reader.error("model_type", "names a model without attention, which is not supported")
    return recurrent


FAMILIES: dict[str, Family] = {
    "bamba": Family(
        bamba,
        "Bamba 9B",
        "selective state spaces (Mamba-2) in most layers, partial rope",
    ),
    "falcon_h1": Family(
        falcon_h1,
        "Falcon-H1 0.5B to 34B",
        "attention beside a selective state space (Mamba-2) in each layer, many multipliers",
    ),
    "granitemoehybrid": Family(
        granitemoehybrid,
        "Granite 4.0 H, with experts and dense",
        "four multipliers; selective state spaces (Mamba-2) in nine layers of ten, no rope, "
        "experts in some",
    ),
}
