"""Tiny random encoders in Hugging Face format, one per family.

directory = tiny_encoders.save("bert", tmp_path)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SHAPE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
_DISTIL = {
    "vocab_size": 160,
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 6,
    "max_position_embeddings": 128,
}

_ROBERTA = {**_SHAPE, "max_position_embeddings": 130}  # the first two positions are unused

# name -> (Hugging Face config class, its values)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SHAPE),
    "bert_relu": ("BertConfig", {**_SHAPE, "hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "camembert": ("CamembertConfig", _ROBERTA),
    "distilbert": ("DistilBertConfig", _DISTIL),
    "mpnet": ("MPNetConfig", _ROBERTA),
    "eurobert": (
        "EuroBertConfig",
        {
            **{**_SHAPE, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3},
            **{"mask_token_id": 4, "classifier_pooling": "mean"},
        },
    ),
    "eurobert_biases": (
        "EuroBertConfig",
        {
            **{**_SHAPE, "attention_bias": True, "mlp_bias": True, "classifier_pooling": "bos"},
            **{"bos_token_id": 2, "eos_token_id": 3, "mask_token_id": 4},
        },
    ),
    # The sixth layer attends to whole texts, the others to eight tokens on each side.
    "embedding_gemma": (
        "Gemma3TextConfig",
        {
            **{**_SHAPE, "num_hidden_layers": 7, "num_attention_heads": 3, "head_dim": 16},
            **{"num_key_value_heads": 1, "query_pre_attn_scalar": 24, "sliding_window": 16},
            **{"use_bidirectional_attention": True, "pad_token_id": 0},
        },
    ),
    # As above, with wider heads in layers that attend to whole texts.
    "embedding_gemma2": (
        "EmbeddingGemma2TextConfig",
        {
            **{**_SHAPE, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 16},
            **{"num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1},
            **{"hidden_size_per_layer_input": 20, "embedding_dim": 56, "sliding_window": 8},
            "pad_token_id": 0,
        },
    ),
    "gte": ("GteConfig", {**_SHAPE, "hidden_act": "gelu_new"}),
    "gte_untyped": ("GteConfig", {**_SHAPE, "type_vocab_size": 0}),
    "modernbert": ("ModernBertConfig", {**_SHAPE, "local_attention": 8}),
    "modernbert_biases": (
        "ModernBertConfig",
        {
            **{**_SHAPE, "local_attention": 31, "norm_eps": 1e-3, "hidden_activation": "silu"},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
            **{"classifier_pooling": "mean", "classifier_activation": "relu"},
            **{"num_attention_heads": 3, "bos_token_id": 2, "eos_token_id": 3},
        },
    ),
    "nomic_bert": ("NomicBertConfig", {**_SHAPE, "layer_norm_eps": 1e-4}),
    "roberta": ("RobertaConfig", {**_ROBERTA, "type_vocab_size": 1}),
    "xlm_roberta": ("XLMRobertaConfig", {**_ROBERTA, "hidden_act": "gelu_new"}),
}


def build(kind: str, *, num_labels: int = 0, seed: int = 0, **changes: Any) -> Any:
    """A Hugging Face model, with a classification head if labels are requested."""
    import torch
    import transformers

    config_class, values = KINDS[kind]
    config = getattr(transformers, config_class)(
        **{**values, **changes}, num_labels=num_labels or 2
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loader = (
            transformers.AutoModelForSequenceClassification
            if num_labels
            else transformers.AutoModel
        )
        model = loader.from_config(config)
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name.lower()
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.data.normal_(1.0, 0.2)
    return model.eval()


def save(kind: str, directory: Path, **options: Any) -> Any:
    """Save ``build(kind)`` as a checkpoint; returns the model."""
    model = build(kind, **options)
    model.save_pretrained(directory)
    return model


def save_tokenizer(directory: Path) -> None:
    """A WordPiece tokenizer of BERT's kind over single letters, for a vocabulary of 160."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!'"
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    words += ["the", "cat", "dog", "sat", "##ing"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[PAD]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
