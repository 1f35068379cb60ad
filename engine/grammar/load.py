"""The backend of a model, when its first grammar comes."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.grammar.backend import GrammarBackend
from engine.types import EngineInfo


def load_backend(config: EngineConfig, info: EngineInfo) -> GrammarBackend:
    """Read the model's tokenizer and make the backend of it; slow for a large vocabulary.

    Raises:
        ModelLoadError: the tokenizer cannot be read.
        InvalidParameter: nothing ends a text of this model.
    """
    from engine.grammar.llguidance_backend import LlguidanceBackend
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(config.tokenizer or config.model)
    return LlguidanceBackend(tokenizer, info.vocab_size, info.eos_token_ids)
