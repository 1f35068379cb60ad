"""Gemma 4: full attention layers have wider and fewer heads than windowed ones."""

from __future__ import annotations

from dataclasses import replace

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import layer_types, num_layers, read_activation, read_decoder
from engine.models.rope_spec import ProportionalScaling, RopeSpec
from engine.models.spec import DecoderSpec, HeadSpec, LayerSpec, MoeSpec, NormSpec

_PERIOD = 6  # every sixth layer has full attention
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERT_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size")


def gemma4(reader: ConfigReader) -> DecoderSpec:
    """Gemma 4's text model."""
    size = reader.non_negative("hidden_size_per_layer_input", 256)
    embedded = reader.count("vocab_size_per_layer_input", 262_144)
    if size and embedded < reader.count("vocab_size"):
        raise reader.error("vocab_size_per_layer_input", "is below 'vocab_size'")
    spec = _text(reader, max_positions=131_072, window=512, moe=_experts(reader))
    if not size:
        return spec
    return replace(
        spec,
        per_layer_size=size,
        per_layer_vocab_size=embedded,
        per_layer_pad_id=read_pad_id(reader, embedded),
    )


def gemma4_unified(reader: ConfigReader) -> DecoderSpec:
    """The text model of the variant that reads images and sound without separate encoders."""
    for key in ("hidden_size_per_layer_input", "enable_moe_block"):
        reader.refuse(key, "is set, which this kind of Gemma 4 does not have")
    for key in ("vocab_size_per_layer_input", *_EXPERT_KEYS):  # unused in this variant
        reader.ignore(key)
    reader.set_defaults({"use_bidirectional_attention": "vision"})
    return _text(reader, max_positions=262_144, window=1024)


def read_pad_id(reader: ConfigReader, embedded: int) -> int:
    """Return the padding token, which has one of the ``embedded`` per-layer embeddings."""
    pad_id = reader.non_negative("pad_token_id", 0)
    if pad_id >= embedded:
        raise reader.error("pad_token_id", f"of {pad_id} is none of {embedded} tokens")
    return pad_id


def _experts(reader: ConfigReader) -> MoeSpec | None:
    """Return every layer's experts, beside its MLP; None if there are none."""
    if not reader.flag("enable_moe_block"):
        for key in _EXPERT_KEYS:
            reader.ignore(key)
        return None
    moe = MoeSpec(
        num_experts=reader.count("num_experts"),
        top_k=reader.count("top_k_experts"),
        intermediate_size=reader.count("moe_intermediate_size"),
        normalised=True,
        with_mlp=True,
    )
    if moe.top_k > moe.num_experts:
        raise reader.error("top_k_experts", f"exceeds the {moe.num_experts} experts")
    return moe


def _text(
    reader: ConfigReader, *, max_positions: int, window: int, moe: MoeSpec | None = None
) -> DecoderSpec:
    if reader.has_value("use_bidirectional_attention", "all"):
        raise reader.error(
            "use_bidirectional_attention", "is 'all': an encoder, which is not supported"
        )
    kinds = _kinds(reader)
    sources = kv_sources(reader, kinds)
    wide = reader.flag("use_double_wide_mlp")  # in layers that read another's keys and values
    wider = 2 * reader.count("intermediate_size") if wide else None
    heads = _heads(reader, kinds)
    whole, local = heads[_FULL], heads.get(_SLIDING)
    full_rope, local_rope = read_ropes_by_layer(
        reader,
        theta=1_000_000.0,
        local_theta=10_000.0,
        trained=reader.count("max_position_embeddings", max_positions),
        head_dim=whole.head_dim,
        default=RopeSpec(1_000_000.0, ProportionalScaling(0.25)),
    )
    sliding = LayerSpec(
        reader.count("sliding_window", window),
        local_rope=True,
        heads=None if local == whole else local,
        experts=moe is not None,
        bidirectional_images=reader.has_value("use_bidirectional_attention", "vision"),
    )
    full = LayerSpec(experts=moe is not None)
    spec = read_decoder(
        reader,
        layers=tuple(
            own
            if source is None
            else replace(own, kv_sharing_layer=source, intermediate_size=wider)
            for own, source in zip(
                (full if kind == _FULL else sliding for kind in kinds), sources, strict=True
            )
        ),
        norm=NormSpec(reader.number("rms_norm_eps", 1e-6)),
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        placement="sandwich",
        embedding_scale=reader.count("hidden_size") ** 0.5,
        attention_scale=1.0,
        keys_are_values=whole.keys_are_values,
        qk_norm=True,
        unit_value_norm=True,
        layer_scales=True,
        moe=moe,
        logit_softcap=reader.optional_number("final_logit_softcapping"),
        rope=full_rope,
        local_rope=local_rope if local is not None else None,
        tied=True,
        head_dim=256,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        max_positions=max_positions,
    )
    return replace(spec, num_kv_heads=whole.num_kv_heads, head_dim=whole.head_dim)


def _kinds(reader: ConfigReader) -> list[str]:
    """Return each layer's kind. The last one has full attention, whatever the config says."""
    count = num_layers(reader)
    kinds = layer_types(reader, count) or [
        _SLIDING if (i + 1) % _PERIOD else _FULL for i in range(count)
    ]
    return [*kinds[:-1], _FULL]


def kv_sources(reader: ConfigReader, kinds: list[str], default: int = 0) -> list[int | None]:
    """Return, for each layer, the layer whose keys and values it reads; None: its own.

    The final layers read those of the last preceding layer of their kind.
    """
    count = len(kinds)
    first = count - reader.non_negative("num_kv_shared_layers", default)
    if first < 1 or set(kinds[first:]) - set(kinds[:first]):
        raise reader.error("num_kv_shared_layers", "leaves no layer whose keys others could read")
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def _heads(reader: ConfigReader, kinds: list[str]) -> dict[str, HeadSpec]:
    """Return each kind of layer's heads.

    They are in ``per_layer_config`` (transformers 5.23), or in two keys for the full layers, as in
    the published models.
    """
    shared = reader.flag("attention_k_eq_v")
    usual = reader.count("num_key_value_heads", 4), reader.count("head_dim", 256)
    wide = reader.count("global_head_dim", 512)
    fewer = reader.optional_count("num_global_key_value_heads")
    own = {_FULL: ((shared and fewer) or usual[0], wide), _SLIDING: usual}
    if "per_layer_config" in reader:
        own = per_layer_heads(reader, kinds, usual)
    num_heads = reader.count("num_attention_heads")
    for num_kv_heads, head_dim in own.values():
        if num_heads % num_kv_heads or head_dim % 2:
            raise reader.error(
                "num_attention_heads",
                f"({num_heads}) does not go with {num_kv_heads} KV heads of width {head_dim}",
            )
    return {
        kind: HeadSpec(*own[kind], keys_are_values=shared and kind == _FULL)
        for kind in dict.fromkeys(kinds)
    }


def per_layer_heads(
    reader: ConfigReader, kinds: list[str], usual: tuple[int, int]
) -> dict[str, tuple[int, int]]:
    """Return each kind's number of KV heads and their width, from ``per_layer_config``."""
    own: dict[str, tuple[int, int]] = {}
    section = reader.section("per_layer_config")
    assert section is not None
    names = {int(name): name for name in section.names if name.isdecimal()}  # may be "04"
    for i, kind in enumerate(kinds):
        heads, entry = usual, section.section(names.get(i, str(i)))
        if entry is not None:
            num_kv_heads = entry.count("num_key_value_heads", usual[0])
            heads = num_kv_heads, entry.count("head_dim", usual[1])
            entry.finish()
        if own.setdefault(kind, heads) != heads:
            raise reader.error("per_layer_config", f"has unlike heads in layers of {kind}")
    section.finish()
    return own


FAMILIES: dict[str, Family] = {
    "gemma4_text": Family(
        gemma4,
        "Gemma 4, text",
        "as `gemma3_text`; fewer and wider heads in full-attention layers, whose keys are also "
        "their values, value norms; in some sizes experts beside the MLP, or per-layer embeddings "
        "and keys shared between layers",
    ),
    "gemma4_unified_text": Family(gemma4_unified, "the same, text model only", "as `gemma4_text`"),
}
