"""docs/responses.md describes every field that /v1/responses accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.openai.responses.events import Event
from server.openai.responses.inputs import FORWARDED, ReasoningOptions, ResponsesRequest
from server.openai.structured import StructuredFields

PAGE = (Path(__file__).parents[2] / "docs" / "responses.md").read_text()
TOLD = set(re.findall(r"`([a-z_.]+)`", PAGE))


def test_every_field_is_told() -> None:
    fields = set(ResponsesRequest.model_fields) - {"stream_options", "text", "reasoning"}
    fields |= {f"reasoning.{name}" for name in ReasoningOptions.model_fields}
    fields |= {"stream_options.include_obfuscation", "text.format", "text.verbosity"}
    fields |= FORWARDED - (set(StructuredFields.model_fields) - {"structured_outputs"})
    assert fields - TOLD == set()


@pytest.mark.parametrize("kind", ["output_text", "reasoning_text", "reasoning_summary_text"])
def test_events_are_told(kind: str) -> None:
    tags = {kind for kind in names(Event) if kind}
    assert f"response.{kind}.delta" in tags
    assert kind in PAGE


def names(base: type[Event]) -> set[str]:
    below = {tag for sub in base.__subclasses__() for tag in names(sub)}
    return below | {str(base.__struct_config__.tag)}
