"""Gemma 3n: several residual streams, per-layer embeddings, sparse MLPs, shared keys."""

from __future__ import annotations

from engine.models.altup_spec import AltUpSpec
from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.gemma4 import kv_sources, read_pad_id
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import layer_types, num_layers, read_activation, read_decoder
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PERIOD = 5  # every fifth layer has full attention
_MAX_STREAMS = 8  # that checkpoints have names for here
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of configs that leave them out


def gemma3n(reader: ConfigReader) -> DecoderSpec:
    """Gemma 3n's text model (E2B, E4B)."""
    reader.set_defaults({"final_logit_softcapping": 30.0})  # null is none
    reader.ignore("altup_coef_clip")  # of training
    reader.ignore("altup_lr_multiplier")
    reader.refuse("use_bidirectional_attention", "is true: an encoder, which is not supported")
    count = num_layers(reader)
    kinds = layer_types(reader, count) or [
        _SLIDING if (i + 1) % _PERIOD else _FULL for i in range(count)
    ]
    widths, sparsity = _widths(reader, count), _sparsity(reader, count)
    window = reader.count("sliding_window", 512)
    layers = tuple(
        LayerSpec(
            window if kind == _SLIDING else None,
            local_rope=kind == _SLIDING,
            kv_sharing_layer=source,
            intermediate_size=width,
            activation_sparsity=share,
        )
        for kind, source, width, share in zip(
            kinds, kv_sources(reader, kinds, default=15), widths, sparsity, strict=True
        )
    )
    full, local = read_ropes_by_layer(
        reader,
        theta=1_000_000.0,
        local_theta=10_000.0,
        trained=reader.count("max_position_embeddings", 32_768),
        head_dim=reader.count("head_dim", 256),
    )
    embedded = reader.count("vocab_size_per_layer_input", 262_144)
    return read_decoder(
        reader,
        layers=layers,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-6)),
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        placement="sandwich",
        embedding_scale=reader.count("hidden_size") ** 0.5,
        attention_scale=1.0,
        qk_norm=True,
        unit_value_norm=True,
        altup=_altup(reader),
        per_layer_size=reader.count("hidden_size_per_layer_input", 256),
        per_layer_vocab_size=embedded,
        per_layer_pad_id=read_pad_id(reader, embedded),
        logit_softcap=reader.optional_number("final_logit_softcapping"),
        rope=full,
        local_rope=local,
        tied=True,
        head_dim=256,
        mlp_width=max(widths),
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        max_positions=32_768,
    )


def _altup(reader: ConfigReader) -> AltUpSpec:
    num_streams = reader.count("altup_num_inputs", 4, limit=_MAX_STREAMS + 1)
    active = reader.non_negative("altup_active_idx", 0)
    if num_streams < 2 or active >= num_streams:
        raise reader.error("altup_num_inputs", f"is {num_streams}, which leaves no other stream")
    return AltUpSpec(
        num_streams=num_streams,
        active=active,
        laurel_rank=reader.count("laurel_rank", 64),
        scales_corrected=reader.flag("altup_correct_scale", True),
    )


def _widths(reader: ConfigReader, count: int) -> list[int]:
    """Return the width of each layer's MLP: one for all, or a list."""
    if not reader.is_list("intermediate_size"):
        return [reader.count("intermediate_size", 16_384)] * count
    widths = reader.layers("intermediate_size")
    if len(widths) != count or min(widths) < 1:
        raise reader.error("intermediate_size", f"must have {count} positive widths")
    return list(widths)


def _sparsity(reader: ConfigReader, count: int) -> list[float]:
    """Return the share of each layer's gates that is zeroed."""
    given = reader.list_of_length("activation_sparsity_pattern", count)
    if given is None:
        sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        return [_SPARSITY] * sparse + [0.0] * (count - sparse)
    for share in given:
        if type(share) not in (int, float) or not 0 <= share < 1:
            raise reader.error("activation_sparsity_pattern", f"has {share!r:.80}")
    return [float(share) for share in given]


FAMILIES: dict[str, Family] = {
    "gemma3n_text": Family(
        gemma3n,
        "Gemma 3n, text",
        "as `gemma3_text`; several residual streams (AltUp), low-rank paths beside attention "
        "(LAuReL), sparse gates, value norms, per-layer embeddings and keys shared between layers",
    ),
}
