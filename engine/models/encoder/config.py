"""Keys that configs of encoders have in common."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.encoder.spec import EncoderActivation
from engine.models.rope_spec import LinearScaling, RopeSpec

MAX_LAYERS = 10_000
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
WITHOUT_EFFECT = (
    *("attention_probs_dropout_prob", "classifier_dropout", "directionality", "emb_size"),
    *("gradient_checkpointing", "hidden_dropout_prob", "output_past", "pooler_fc_size"),
    *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    *("pooler_type", "tie_word_embeddings", "eos_token_id"),
)


def read_num_heads(
    reader: ConfigReader, key: str, hidden_size: int, *, rotary: bool = False
) -> int:
    """Return the number of heads. Raises ModelLoadError if they do not divide the dimensions, or
    have an odd number of them where positions are rotary."""
    count = reader.count(key, 12)
    if hidden_size % count:
        raise reader.error(key, f"must divide the {hidden_size} dimensions")
    if rotary and hidden_size // count % 2:
        raise reader.error(key, f"must leave heads of an even part of {hidden_size} dimensions")
    return count


def read_activation(reader: ConfigReader, key: str, default: str = "gelu") -> EncoderActivation:
    """Return the activation. Raises ModelLoadError for an unknown one."""
    name = reader.text(key, default)
    if name not in _ACTIVATIONS:
        raise reader.error(key, f"is {name[:80]!r}; known: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def read_dtype(reader: ConfigReader) -> str | None:
    """Return ``dtype``, or ``torch_dtype``, its name before transformers 5."""
    older = reader.text("torch_dtype", "")
    return reader.text("dtype", older) or None


def read_rope(section: ConfigReader | None, theta: float, *, scalable: bool = False) -> RopeSpec:
    """Read a rotary embedding from its section.

    Args:
        section: ``rope_parameters``; None: absent.
        theta: the default base.
        scalable: whether frequencies may be divided by a factor, as GTE's are.

    Raises:
        ModelLoadError: its frequencies are scaled in a way that no published encoder needs.
    """
    if section is None:
        return RopeSpec(theta)
    scaling = None
    if scalable and section.has_value("rope_type", "linear"):
        scaling = LinearScaling(section.number("factor"))
    else:
        section.require("rope_type", "default")
    section.require("partial_rotary_factor", 1.0)
    theta = section.number("rope_theta", theta, above=1.0)
    section.finish()
    return RopeSpec(theta, scaling)
