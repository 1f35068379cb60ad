"""Helpers shared by all family readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.rope import read_rope
from engine.models.rope_spec import MropeSpec
from engine.models.spec import Activation, DecoderSpec, LayerSpec, NormSpec, TemperatureSpec

_MAX_LAYERS = 10_000
# Keys of the rope section that ``read_temperature`` reads, or that have no effect.
TEMPERATURE_ROPE_KEYS = ("llama_4_scaling_beta", "max_position_embeddings")

# Hugging Face's names of activations.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Additional activations of MLPs without a gate.
_UNGATED: dict[str, Activation] = {
    **_ACTIVATIONS,
    **{"relu": "relu", "relu2": "relu2", "xielu": "xielu"},
}


def read_decoder(
    reader: ConfigReader,
    *,
    layers: tuple[LayerSpec, ...] | None = None,
    norm: NormSpec | None = None,
    tied: bool = False,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    max_positions: int = 2048,
    intermediate_size: int | None = None,
    mlp_width: int | None = None,
    rope_extra_keys: tuple[str, ...] = (),
    mrope: MropeSpec | None = None,
    **fields: Any,
) -> DecoderSpec:
    """Read a model whose keys have Llama's names.

    Args:
        reader: the config.
        layers: the layers, if they differ; default: all alike, without windows.
        norm: default: RMS with ``rms_norm_eps``.
        tied, head_dim, theta, partial, max_positions, intermediate_size: the family's defaults for
            absent keys.
        mlp_width: the ``intermediate_size``, if the family reads it by itself.
        interleaved: the family's layout of rotary dimensions.
        rope_extra_keys: keys of the rope section unrelated to frequencies.
        mrope: the family's, if images have three-dimensional positions.
        fields: fields of ``DecoderSpec``; a ``rope`` among them is used as it is.

    Raises:
        ModelLoadError: a value is missing or out of range.
    """
    hidden_size = reader.count("hidden_size")
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide the {num_heads} attention heads")
    head_dim = reader.count("head_dim", head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"must be even for rotary positions, not {head_dim}")
    trained = reader.count("max_position_embeddings", max_positions)
    if "rope" not in fields:
        fields["rope"] = read_rope(
            reader,
            theta=theta,
            trained=trained,
            head_dim=head_dim,
            partial=partial,
            interleaved=interleaved,
            extra_keys=rope_extra_keys,
            mrope=mrope,
        )
    is_gated = fields.get("gated", True)
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=mlp_width or reader.count("intermediate_size", intermediate_size),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=trained,
        norm=norm or NormSpec(reader.number("rms_norm_eps", 1e-6)),
        layers=layers or (LayerSpec(),) * num_layers(reader),
        **{
            "activation": read_activation(reader, "hidden_act", gated=is_gated),
            "tie_word_embeddings": reader.flag("tie_word_embeddings", tied),
            **fields,
        },
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def set_aliases(reader: ConfigReader, aliases: Mapping[str, str]) -> None:
    """Give keys the values of a family's other names for them (alias -> key).

    Raises:
        ModelLoadError: both are present, and differ.
    """
    for alias, own in aliases.items():
        if alias in reader:
            reader.set_defaults({own: reader.value(alias)})
            reader.require(own, reader.value(alias))


def num_layers(reader: ConfigReader, key: str = "num_hidden_layers") -> int:
    """Return the model's number of layers."""
    return reader.count(key, limit=_MAX_LAYERS)


def read_gate_limits(reader: ConfigReader, key: str, count: int) -> list[float | None]:
    """Return what clamps the SwiGLU of each of ``count`` layers; None: nothing, as for 0.

    Raises ModelLoadError for what is no list of limits.
    """
    limits = reader.list_of_length(key, count) or [None] * count
    for limit in limits:
        if limit is not None and (type(limit) not in (int, float) or limit < 0):
            raise reader.error(key, f"has {limit!r:.80}, which is not a limit")
    return [limit or None for limit in limits]


def read_activation(
    reader: ConfigReader, key: str, default: str = "silu", *, gated: bool = True
) -> Activation:
    """Return the MLP's activation. Raises ModelLoadError for an unknown one."""
    name, table = reader.text(key, default), _ACTIVATIONS if gated else _UNGATED
    if name not in table:
        known = ", ".join(sorted(table))
        raise reader.error(key, f"is {name[:80]!r}; known: {known}")
    return table[name]


def read_dtype(reader: ConfigReader) -> str | None:
    """Return ``dtype``, or ``torch_dtype``, its name before transformers 5."""
    older = reader.text("torch_dtype", "")
    return reader.text("dtype", older) or None


def read_temperature(reader: ConfigReader) -> TemperatureSpec | None:
    """Read the query factor that grows with the position from Mistral's rope section; None: no
    factor.

    Raises:
        ModelLoadError: there is no such section.
    """
    section = reader.section("rope_parameters")
    if section is None:
        raise reader.error("rope_parameters", "is missing")
    if "llama_4_scaling_beta" not in section:
        return None
    return TemperatureSpec(
        section.number("llama_4_scaling_beta", above=-1.0),
        section.count("original_max_position_embeddings"),
        position_offset=0,
        with_rope=True,
    )


def layer_types(reader: ConfigReader, count: int) -> list[str] | None:
    """Return ``layer_types``, if given: "full_attention" or "sliding_attention" for each layer."""
    kinds = reader.list_of_length("layer_types", count)
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    return kinds


def ignore_router_training(reader: ConfigReader) -> None:
    """Ignore the keys of experts that are only for training."""
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        reader.ignore(key)


def alternating_layers(reader: ConfigReader, *, window: int | None, period: int) -> list[str]:
    """Return ``layer_types``, or by default full attention in the last of every ``period`` layers.

    Without a window, all layers have full attention.
    """
    count = num_layers(reader)
    kinds = layer_types(reader, count)
    if kinds is not None:
        return kinds
    return [
        "full_attention" if window is None or (i + 1) % period == 0 else "sliding_attention"
        for i in range(count)
    ]


def with_checked_experts(reader: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec, if a token does not choose more experts than there are.

    Raises:
        ModelLoadError: it does.
    """
    assert spec.moe is not None
    if spec.moe.top_k > spec.moe.num_experts:
        raise reader.error("num_experts_per_tok", f"exceeds the {spec.moe.num_experts} experts")
    return spec
