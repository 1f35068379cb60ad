"""Family readers of encoders: a Hugging Face config becomes an EncoderSpec, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from engine.models.config_reader import ConfigReader
from engine.models.encoder.spec import EncoderActivation, EncoderSpec
from engine.models.output_head import read_head

_MAX_LAYERS = 10_000
_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Keys of training, of heads that are not served, and of older exports.
_WITHOUT_EFFECT = (
    *("attention_probs_dropout_prob", "classifier_dropout", "directionality", "emb_size"),
    *("gradient_checkpointing", "hidden_dropout_prob", "output_past", "pooler_fc_size"),
    *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    *("pooler_type", "tie_word_embeddings", "eos_token_id"),
)


def bert(reader: ConfigReader) -> EncoderSpec:
    """BERT (Devlin et al. 2018) and its distillations of the same shape, such as MiniLM."""
    return _read_bert(reader, position_offset=0)


def roberta(reader: ConfigReader) -> EncoderSpec:
    """RoBERTa and XLM-RoBERTa: positions start after the padding token's id."""
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
        num_heads=_read_heads(reader, "n_heads", hidden_size),
        num_layers=reader.count("n_layers", 6, limit=_MAX_LAYERS),
        max_position_embeddings=reader.count("max_position_embeddings", 512),
        activation=_read_activation(reader, "activation"),
        num_labels=head.num_labels,
        head_activation="relu",
        score_sigmoid=head.sigmoid,
        checkpoint_dtype=_read_dtype(reader),
    )


class EncoderFamily(NamedTuple):
    """How a Hugging Face model_type is read."""

    read: Callable[[ConfigReader], EncoderSpec]
    models: str


ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(bert, "BERT, MiniLM, BGE and E5 in English, many rerankers"),
    "distilbert": EncoderFamily(distilbert, "DistilBERT"),
    "mpnet": EncoderFamily(mpnet, "MPNet, all-mpnet-base"),
    "roberta": EncoderFamily(roberta, "RoBERTa"),
    "xlm-roberta": EncoderFamily(roberta, "XLM-RoBERTa, BGE-M3, multilingual E5, BGE rerankers"),
}


def _read_bert(reader: ConfigReader, *, position_offset: int) -> EncoderSpec:
    reader.require("position_embedding_type", "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        reader.require(key, False)
    for key in _WITHOUT_EFFECT:
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
        num_heads=_read_heads(reader, "num_attention_heads", hidden_size),
        num_layers=reader.count("num_hidden_layers", 12, limit=_MAX_LAYERS),
        max_position_embeddings=rows,
        position_offset=position_offset,
        num_token_types=reader.count("type_vocab_size", 2),
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        activation=_read_activation(reader, "hidden_act"),
        num_labels=head.num_labels,
        score_sigmoid=head.sigmoid,
        checkpoint_dtype=_read_dtype(reader),
    )


def _read_heads(reader: ConfigReader, key: str, hidden_size: int) -> int:
    count = reader.count(key, 12)
    if hidden_size % count:
        raise reader.error(key, f"must divide the {hidden_size} dimensions")
    return count


def _read_activation(reader: ConfigReader, key: str) -> EncoderActivation:
    name = reader.text(key, "gelu")
    if name not in _ACTIVATIONS:
        raise reader.error(key, f"is {name[:80]!r}; known: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _read_dtype(reader: ConfigReader) -> str | None:
    older = reader.text("torch_dtype", "")
    return reader.text("dtype", older) or None
