"""Whisper's decoder (Radford et al. 2022); its encoder is read by ``engine/models/audio``."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import num_layers, read_activation, read_dtype
from engine.models.source_spec import SourceSpec
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec

# The encoder's, which ``engine/models/audio`` reads.
_ENCODERS = (
    *("encoder_attention_heads", "encoder_ffn_dim", "encoder_layerdrop", "encoder_layers"),
    *("num_mel_bins", "num_hidden_layers"),
)
# Of training, of classification, and of generation, where generation_config.json is missing.
_WITHOUT_EFFECT = (
    *("activation_dropout", "apply_spec_augment", "classifier_proj_size", "decoder_layerdrop"),
    *("dropout", "forced_decoder_ids", "init_std", "mask_feature_length", "mask_feature_min_masks"),
    *("mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob"),
    *("median_filter_width", "use_weighted_layer_sum"),
)


def whisper(reader: ConfigReader) -> DecoderSpec:
    """Whisper and Distil-Whisper."""
    for key in (*_ENCODERS, *_WITHOUT_EFFECT):
        reader.ignore(key)
    for key, value in (("is_encoder_decoder", True), ("scale_embedding", False)):
        reader.require(key, value)
    hidden_size = reader.count("d_model", 384)
    num_heads = reader.count("decoder_attention_heads", 6)
    if hidden_size % num_heads:
        raise reader.error("decoder_attention_heads", f"must divide the {hidden_size} dimensions")
    source = SourceSpec(reader.count("max_source_positions", 1500))
    positions = reader.count("max_target_positions", 448)
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size", 51_865),
        hidden_size=hidden_size,
        intermediate_size=reader.count("decoder_ffn_dim", 1536),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=source.num_places + positions,
        norm=NormSpec(1e-5, "layer", bias=True),
        rope=None,
        layers=(LayerSpec(),) * (num_layers(reader, "decoder_layers")),
        activation=read_activation(reader, "activation_function", "gelu", gated=False),
        gated=False,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        qkv_bias=True,
        key_bias=False,
        output_bias=True,
        mlp_bias=True,
        source=source,
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


FAMILIES: dict[str, Family] = {
    "whisper": Family(
        whisper,
        "Whisper tiny to large-v3 and large-v3-turbo, Distil-Whisper",
        "encoder-decoder: attention to audio in each layer, learned positions, layer norms, "
        "biases, ungated MLP; accepts audio and nothing else",
    ),
}
