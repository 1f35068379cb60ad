"""What agents send: system messages between turns, and tools with long names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.asgi import FakeEngine, running_app

_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
_MOVED = "[system]A\n\nB[user]1[assistant]2[user]3"


def turns(role: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": role, "content": "B"},
        {"role": "user", "content": "3"},
    ]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "A"}, *turns("developer")]},
        ),
        ("/v1/messages", {"system": "A", "messages": turns("system"), "max_tokens": 5}),
        ("/v1/responses", {"instructions": "A", "input": turns("developer"), "store": False}),
    ],
)
async def test_later_system_messages_are_part_of_the_first(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    source = tmp_path / "template.jinja"
    source.write_text(_TEMPLATE)
    engine = FakeEngine()
    engine.max_model_len = 1024
    async with running_app(engine=engine, chat_template=source) as app:
        call = app.post(path, **fields)
        stream = await engine.next_stream()
        stream.put(300, end="length")
        assert (await call.done()).status == 200
        model = await app.state.model()
        assert model.tokenizer.decode(stream.request.prompt_token_ids) == _MOVED


@pytest.mark.parametrize("length", [128, 129])
async def test_names_of_tools_are_as_long_as_those_of_mcp_servers(length: int) -> None:
    name = "mcp__" + "x" * (length - 5)
    engine = FakeEngine()
    engine.max_model_len = 2048
    async with running_app(engine=engine) as app:
        hi = [{"role": "user", "content": "Hi"}]
        for path, fields in (
            (
                "/v1/chat/completions",
                {"tools": [{"type": "function", "function": {"name": name}}], "messages": hi},
            ),
            (
                "/v1/messages",
                {"tools": [{"name": name, "input_schema": {}}], "messages": hi, "max_tokens": 5},
            ),
            (
                "/v1/responses",
                {"tools": [{"type": "function", "name": name, "strict": False}], "input": "Hi"},
            ),
        ):
            call = app.post(path, **fields)
            if length == 128:
                (await engine.next_stream()).put(300, end="length")
            assert (await call.done()).status == (200 if length == 128 else 400)
