"""docs/parameters.md describes exactly the fields that chats and completions accept."""

from __future__ import annotations

import re

from server.openai.inputs import ChatRequest, CompletionRequest, StreamOptions
from server.openai.unsupported import known_names
from tests.servers import ROOT


def test_the_page_of_parameters_is_whole() -> None:
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs" / "parameters.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *known_names()}
    assert sorted(told) == sorted(set(told)), "told twice"
    assert set(told) == fields


def test_the_page_tells_the_options_of_a_stream() -> None:
    (row,) = re.findall(
        r"^\| `stream_options` .*$", (ROOT / "docs" / "parameters.md").read_text(), re.MULTILINE
    )
    assert all(f"`{name}`" in row for name in StreamOptions.model_fields)


def test_the_page_links_to_pages_that_are_there() -> None:
    docs = ROOT / "docs"
    links = re.findall(r"\]\((\w[\w-]*\.md)", (docs / "parameters.md").read_text())
    assert links
    assert all((docs / link).is_file() for link in links)
