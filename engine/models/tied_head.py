"""Heads of language models that are not what the config says.

A config may call the head tied to the embedding, though the files have another one: tuning may
change one of the two and leave the config as it was. Transformers 5 compares them, and uses both
where they differ. And embedding models were published without the head that the config of the model
they were made from has (Qwen3-Embedding-8B).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from engine.models.names import rules_of
from engine.models.safetensors import Header, TensorEntry, are_equal
from engine.models.spec import DecoderSpec
from engine.models.spelling import speller

logger = logging.getLogger(__name__)


def with_own_head(spec: DecoderSpec, headers: Iterable[Header]) -> DecoderSpec:
    """Return the spec of a tied model, with a head of its own if the files have one unlike the
    embedding.

    Raises:
        ModelLoadError: a file has become shorter than its header says.
    """
    rules = rules_of(spec.naming or spec.architecture)
    spell, parameters = speller(rules), {rule.pattern: rule.parameter for rule in rules}
    found: dict[str, tuple[Header, TensorEntry]] = {}
    for header in headers:
        for name, entry in header.entries.items():
            found[parameters.get(spell(name), "")] = header, entry
    if "head" not in found or "embedding" not in found:
        return spec
    if are_equal(found["head"], found["embedding"]):
        return spec
    logger.warning(
        "%s: '%s' differs from the embedding, which config.json calls it; both are used",
        found["head"][0].path,
        found["head"][1].name,
    )
    return replace(spec, tie_word_embeddings=False)


def without_missing_head(spec: DecoderSpec, headers: Iterable[Header]) -> DecoderSpec:
    """Return the spec of an untied embedding model, without a head if the files have none.

    Such a model then generates nothing.
    """
    rules = rules_of(spec.naming or spec.architecture)
    spell = speller(rules)
    # With a dot: a quantised one has other tensors than a weight.
    modules = {rule.pattern.removesuffix("weight") for rule in rules if rule.parameter == "head"}
    names = (spell(name) for header in headers for name in header.entries)
    if any(name.startswith(tuple(modules)) for name in names):
        return spec
    logger.warning("the files have no head, though config.json says so: no text is generated")
    return replace(spec, is_generative=False)
