"""Family readers of encoders: a Hugging Face config becomes an EncoderSpec, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from engine.models.config_reader import ConfigReader
from engine.models.encoder.config import (
    MAX_LAYERS,
    WITHOUT_EFFECT,
    read_activation,
    read_dtype,
    read_num_heads,
)
from engine.models.encoder.rotary_families import eurobert, gte, modernbert, nomic_bert
from engine.models.encoder.spec import EncoderSpec, HeadSpec
from engine.models.output_head import read_head


def bert(reader: ConfigReader) -> EncoderSpec:
    """BERT (Devlin et al. 2018) and its distillations of the same shape, such as MiniLM."""
    return _read_bert(reader, position_offset=0)


def roberta(reader: ConfigReader) -> EncoderSpec:
    """RoBERTa, XLM-RoBERTa and CamemBERT: positions start after the padding token's id."""
    padding = reader.token_ids("pad_token_id")
    return _read_bert(reader, position_offset=(padding[0] if padding else 1) + 1)


def mpnet(reader: ConfigReader) -> EncoderSpec:
    """MPNet (Song et al. 2020): relative position buckets in addition, and no token types."""
    buckets = reader.count("relative_attention_num_buckets", 32)
    if buckets % 4:
        raise reader.error("relative_attention_num_buckets", "must be a multiple of 4")
    spec = _read_bert(reader, position_offset=2)
    return replace(spec, num_token_types=0, relative_buckets=buckets)


def distilbert(reader: ConfigReader) -> EncoderSpec:
    """DistilBERT: BERT without token types, with its own parameter names."""
    for key in ("attention_dropout", "dropout", "qa_dropout", "seq_classif_dropout"):
        reader.ignore(key)
    for key in ("sinusoidal_pos_embds", "tie_weights_", "tie_word_embeddings"):
        reader.ignore(key)  # its positions are in the checkpoint in either case
    head = read_head(reader)
    return EncoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=(hidden_size := reader.count("dim", 768)),
        intermediate_size=reader.count("hidden_dim", 3072),
        num_heads=read_num_heads(reader, "n_heads", hidden_size),
        num_layers=reader.count("n_layers", 6, limit=MAX_LAYERS),
        max_position_embeddings=reader.count("max_position_embeddings", 512),
        activation=read_activation(reader, "activation"),
        num_labels=head.num_labels,
        head=HeadSpec(activation="relu"),
        score_sigmoid=head.sigmoid,
        checkpoint_dtype=read_dtype(reader),
    )


class EncoderFamily(NamedTuple):
    """How a Hugging Face model_type is read."""

    read: Callable[[ConfigReader], EncoderSpec]
    models: str
    has_remote_code: bool = False  # see ``engine.models.families.family``


ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(bert, "BERT, MiniLM, BGE and E5 in English, many rerankers"),
    "camembert": EncoderFamily(roberta, "CamemBERT, embeddings and rerankers in French"),
    "distilbert": EncoderFamily(distilbert, "DistilBERT"),
    "eurobert": EncoderFamily(
        eurobert, "EuroBERT, and Jina's embeddings v5 nano on it", has_remote_code=True
    ),
    "gte": EncoderFamily(
        gte,
        "GTE v1.5 and multilingual, converted for transformers; Arctic-Embed M v2.0",
        has_remote_code=True,
    ),
    "modernbert": EncoderFamily(
        modernbert, "ModernBERT, GTE and Nomic's embeddings on it, rerankers"
    ),
    "mpnet": EncoderFamily(mpnet, "MPNet, all-mpnet-base"),
    "new": EncoderFamily(
        gte, "GTE v1.5 and multilingual, as Alibaba published them", has_remote_code=True
    ),
    "nomic_bert": EncoderFamily(
        nomic_bert, "Nomic BERT, nomic-embed-text v1 and v1.5", has_remote_code=True
    ),
    "roberta": EncoderFamily(roberta, "RoBERTa"),
    "xlm-roberta": EncoderFamily(roberta, "XLM-RoBERTa, BGE-M3, multilingual E5, BGE rerankers"),
}


def _read_bert(reader: ConfigReader, *, position_offset: int) -> EncoderSpec:
    reader.require("position_embedding_type", "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        reader.require(key, False)
    for key in WITHOUT_EFFECT:
        reader.ignore(key)
    head = read_head(reader)
    rows = reader.count("max_position_embeddings", 512)
    if rows <= position_offset:
        raise reader.error("max_position_embeddings", "leaves no position to a text")
    return EncoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=(hidden_size := reader.count("hidden_size", 768)),
        intermediate_size=reader.count("intermediate_size", 3072),
        num_heads=read_num_heads(reader, "num_attention_heads", hidden_size),
        num_layers=reader.count("num_hidden_layers", 12, limit=MAX_LAYERS),
        max_position_embeddings=rows,
        position_offset=position_offset,
        num_token_types=reader.count("type_vocab_size", 2),
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        activation=read_activation(reader, "hidden_act"),
        num_labels=head.num_labels,
        score_sigmoid=head.sigmoid,
        checkpoint_dtype=read_dtype(reader),
    )
