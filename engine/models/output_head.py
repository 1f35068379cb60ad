"""Which head a checkpoint has: a language model's, a classifier's, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config_reader import ConfigReader
from engine.models.spec import DecoderSpec

_USUAL_LABELS = 2  # Hugging Face's default
_SIGMOID, _IDENTITY = "Sigmoid", "Identity"  # classes of torch.nn


@dataclass(frozen=True, slots=True)
class OutputHeadSpec:
    """What the last hidden states become."""

    is_generative: bool = True
    num_labels: int = 0
    sigmoid: bool = True


def read_head(reader: ConfigReader) -> OutputHeadSpec:
    """Determine the head from the suffix of the name in ``architectures``.

    Raises:
        ModelLoadError: a key has an impossible value.
    """
    names = reader.texts("architectures")
    labels = reader.optional_count("num_labels")
    by_id = reader.mapping("id2label")
    sigmoid = _read_activation(reader)
    if names and names[0].endswith("ForSequenceClassification"):
        return OutputHeadSpec(False, labels or len(by_id) or _USUAL_LABELS, sigmoid)
    name = names[0] if names else ""
    # The second condition is for GPT2LMHeadModel.
    return OutputHeadSpec(is_generative=not name.endswith("Model") or "Head" in name)


def with_head(spec: DecoderSpec, reader: ConfigReader) -> DecoderSpec:
    """Return the decoder with the head that its config names. Raises as ``read_head`` does."""
    head = read_head(reader)
    return replace(
        spec,
        is_generative=head.is_generative,
        num_labels=head.num_labels,
        score_sigmoid=head.sigmoid,
    )


def _read_activation(reader: ConfigReader) -> bool:
    """Return whether sentence-transformers applies a sigmoid to scores, which is its default."""
    section = reader.section("sentence_transformers")
    newer = None if section is None else read_score_activation(section, "activation_fn")
    older = read_score_activation(reader, "sbert_ce_default_activation_function")
    return next((each for each in (newer, older) if each is not None), True)


def read_score_activation(reader: ConfigReader, key: str) -> bool | None:
    """Return whether the activation named by ``key`` is a sigmoid; None if none is named.

    Raises:
        ModelLoadError: it is neither that nor the identity.
    """
    name = reader.text(key, "")
    if not name:
        return None
    kind = name.rpartition(".")[2]
    if kind not in (_SIGMOID, _IDENTITY):
        raise reader.error(key, f"is {name[:80]!r}; known: {_SIGMOID}, {_IDENTITY}")
    return kind == _SIGMOID
