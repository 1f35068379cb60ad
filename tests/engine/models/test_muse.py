"""Muse Glimmer's configs: what is read as published, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.families import read_spec
from engine.models.spec import DecoderSpec
from tests import tiny_models


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tiny_models.save("muse_glimmer", tmp_path_factory.mktemp("muse"))
    assert read_config(str(directory)).vision is None, "its encoder is not read"
    return json.loads((directory / "config.json").read_text())


def spec_of(config: dict[str, Any], **changes: Any) -> DecoderSpec:
    spec = read_spec({**config, "text_config": {**config["text_config"], **changes}})
    assert isinstance(spec, DecoderSpec)
    return spec


def test_lists_that_are_left_out_are_the_classs(config):
    assert spec_of(config, layer_rope_theta=None, layer_types=None) == spec_of(config)
    assert [layer.rope for layer in spec_of(config).layers] == [False, True, True, True, False]
    assert [layer.window for layer in spec_of(config).layers] == [None, 12, 12, 12, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_rope_theta": [0, 1.0, 1.0, 1.0, 0]}, "'layer_rope_theta' has a base other than"),
        ({"layer_rope_theta": [0, "a", 1, 1, 0]}, "'layer_rope_theta' must be a list of numbers"),
        ({"attention_bias": True}, "'attention_bias' is True"),
        ({"model_type": "gemma2"}, "'model_type' is 'gemma2'"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is true"),
    ],
)
def test_what_differs_is_refused(config, changes, message):
    with pytest.raises(ModelLoadError, match=message):
        spec_of(config, **changes)


def test_a_config_without_sections_is_refused():
    """As in the format without sections that trainers save."""
    flat = {"model_type": "muse_glimmer", "hidden_size": 6656, "has_vision": True}
    with pytest.raises(ModelLoadError, match="'text_config' is missing"):
        read_spec(flat)
