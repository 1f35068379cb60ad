"""What the tests of models share."""

from __future__ import annotations

import pytest

from engine.models import config_reader


@pytest.fixture
def all_keys_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Hugging Face's implementations read whatever a config has."""
    monkeypatch.setattr(config_reader, "unused_keys", lambda _model_type, _keys: set())
