"""Which head a checkpoint has: the one that scores tokens, one that scores texts, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec

_USUAL_LABELS = 2  # what Hugging Face takes where a config does not say
_SIGMOID, _IDENTITY = "Sigmoid", "Identity"


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What the last hidden states are made into."""

    generates: bool = True
    num_labels: int = 0
    sigmoid: bool = True


def read_head(reader: ConfigReader) -> HeadSpec:
    """The head that ``architectures`` names, by the end of its name.

    Raises:
        ModelLoadError: a key has a value that cannot be.
    """
    names = reader.texts("architectures")
    labels = reader.optional_count("num_labels")
    by_id = reader.mapping("id2label")
    sigmoid = _read_activation(reader)
    if names and names[0].endswith("ForSequenceClassification"):
        return HeadSpec(False, labels or len(by_id) or _USUAL_LABELS, sigmoid)
    name = names[0] if names else ""
    return HeadSpec(generates=not name.endswith("Model") or "Head" in name)  # GPT2LMHeadModel


def with_head(spec: DecoderSpec, reader: ConfigReader) -> DecoderSpec:
    """A decoder with the head that its config names. Raises as ``read_head`` does."""
    head = read_head(reader)
    return replace(
        spec,
        generates=head.generates,
        num_labels=head.num_labels,
        score_sigmoid=head.sigmoid,
    )


def _read_activation(reader: ConfigReader) -> bool:
    """Whether sentence-transformers takes the sigmoid of a score: unless it is told otherwise."""
    section = reader.section("sentence_transformers")
    newer = None if section is None else section.text("activation_fn", "") or None
    older = reader.text("sbert_ce_default_activation_function", "") or None
    name = (newer or older or _SIGMOID).rpartition(".")[2]
    if name not in (_SIGMOID, _IDENTITY):
        raise reader.error("sbert_ce_default_activation_function", f"is {name[:80]!r}")
    return name == _SIGMOID
