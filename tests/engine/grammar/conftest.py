from __future__ import annotations

from pathlib import Path

import pytest

from engine.grammar.llguidance_backend import LlguidanceBackend
from engine.paths import default_model_dir
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(Path(default_model_dir()))


@pytest.fixture(scope="session")
def backend(demo_tokenizer: Tokenizer) -> LlguidanceBackend:
    """The backend for the demo model's vocabulary, with eight more logits than there are tokens."""
    size = demo_tokenizer.vocab_size + 8
    return LlguidanceBackend(demo_tokenizer, size, demo_tokenizer.eos_token_ids)
