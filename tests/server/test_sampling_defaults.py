"""The sampling defaults that a model ships with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.openai.defaults import read_sampling_defaults


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({"temperature": 0.6, "top_k": 20.0, "min_p": None}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"eos_token_id": 2}, {}),
    ],
)
def test_they_are_those_of_the_file(
    config: dict[str, Any], defaults: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    found = read_sampling_defaults(str(tmp_path))
    assert found == defaults
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in defaults.items()
    }


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"temperature": "hot"}, "'temperature' must be a number, not \"hot\""),
        ({"temperature": 3.0, "top_p": 0.5}, "'temperature' must be between 0 and 2"),
        ({"top_p": [0.9]}, "'top_p' must be a number, not [0.9]"),
        ({"min_p": True}, "'min_p' must be a number, not true"),
        ({"top_k": 20.5}, "'top_k' must be an integer, not 20.5"),
        ({"repetition_penalty": float("nan")}, "'repetition_penalty' must be between 0.01 and 10"),
    ],
)
def test_what_is_wrong_with_them_is_told_in_a_sentence(
    config: dict[str, Any], problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert read_sampling_defaults(str(tmp_path)) == {}
    (told,) = caplog.messages
    assert told == f"the sampling defaults in generation_config.json are not used: {problem}"
