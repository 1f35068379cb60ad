"""Loads the grammar backend of a model, when its first grammar arrives."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.grammar.backend import GrammarBackend
from engine.types import EngineInfo


def load_backend(config: EngineConfig, info: EngineInfo) -> GrammarBackend:
    """Make the backend from the model's tokenizer; slow for a large vocabulary.

    Raises:
        ModelLoadError: the tokenizer cannot be read.
        InvalidParameter: the model has no token that ends a text.
    """
    from engine.grammar.llguidance_backend import LlguidanceBackend
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(config.tokenizer or config.model)
    return LlguidanceBackend(tokenizer, info.vocab_size, info.eos_token_ids)
