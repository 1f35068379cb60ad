"""What the readers of all families share."""

from __future__ import annotations

from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.rope import read_rope
from engine.models.rope_spec import RopePlanes
from engine.models.spec import Activation, DecoderSpec, LayerSpec, NormSpec, TemperatureSpec

_MAX_LAYERS = 10_000
# Keys of the rope's section that ``read_temperature`` reads, or that say nothing.
TEMPERED_ROPE = ("llama_4_scaling_beta", "max_position_embeddings")

# Hugging Face's names of activations.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Those that MLPs without a gate have besides.
_UNGATED: dict[str, Activation] = {**_ACTIVATIONS, "relu": "relu", "relu2": "relu2"}


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
    rope_besides: tuple[str, ...] = (),
    rope_planes: RopePlanes | None = None,
    **fields: Any,
) -> DecoderSpec:
    """The spec of a model whose keys are named as Llama's.

    Args:
        reader: the config.
        layers: where they differ; all alike, without windows, when left out.
        norm: RMS with ``rms_norm_eps`` when left out.
        tied, head_dim, theta, partial, max_positions, intermediate_size: the family's defaults for
            what the config leaves out.
        interleaved: the family's layout of rotary dimensions.
        rope_besides: keys of the rope's section that say nothing about frequencies.
        rope_planes: the family's, where images have positions of their own.
        fields: fields of ``DecoderSpec``; a ``rope`` among them is taken as it is.

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
            besides=rope_besides,
            planes=rope_planes,
        )
    is_gated = fields.get("gated", True)
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size", intermediate_size),
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


def num_layers(reader: ConfigReader, key: str = "num_hidden_layers") -> int:
    """How many layers the model has."""
    return reader.count(key, limit=_MAX_LAYERS)


def read_activation(
    reader: ConfigReader, key: str, default: str = "silu", *, gated: bool = True
) -> Activation:
    """The activation of the MLP. Raises ModelLoadError for one that is not known."""
    name, table = reader.text(key, default), _ACTIVATIONS if gated else _UNGATED
    if name not in table:
        known = ", ".join(sorted(table))
        raise reader.error(key, f"is {name[:80]!r}; known: {known}")
    return table[name]


def read_dtype(reader: ConfigReader) -> str | None:
    """``dtype``, or ``torch_dtype`` as it was called before transformers 5."""
    older = reader.text("torch_dtype", "")
    return reader.text("dtype", older) or None


def read_temperature(reader: ConfigReader) -> TemperatureSpec | None:
    """What queries grow by with their position, as Mistral's rope section tells it; None: nothing.

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
        first=0,
        with_rope=True,
    )


def layer_types(reader: ConfigReader, count: int) -> list[str] | None:
    """``layer_types``: "full_attention" or "sliding_attention" for each layer, where given."""
    kinds = reader.listed("layer_types", count)
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    return kinds


def ignore_router_training(reader: ConfigReader) -> None:
    """Keys of models with experts that are for training alone."""
    for key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        reader.ignore(key)


def alternating_layers(reader: ConfigReader, *, window: int | None, period: int) -> list[str]:
    """``layer_types``, or where absent: of every ``period`` layers the last sees everything, or all
    where there is no window."""
    count = num_layers(reader)
    kinds = layer_types(reader, count)
    if kinds is not None:
        return kinds
    return [
        "full_attention" if window is None or (i + 1) % period == 0 else "sliding_attention"
        for i in range(count)
    ]


def with_checked_experts(reader: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """The spec, if a token does not choose more experts than there are.

    Raises:
        ModelLoadError: it does.
    """
    assert spec.moe is not None
    if spec.moe.top_k > spec.moe.num_experts:
        raise reader.error("num_experts_per_tok", f"exceeds the {spec.moe.num_experts} experts")
    return spec
