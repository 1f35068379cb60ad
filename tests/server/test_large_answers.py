"""A large response is made while other requests are served."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.types import TokenLogprobs
from server.openai import chat, completions
from tests.server.asgi import running_app

FORMS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("/v1/completions", completions, "completion_logprobs", {"prompt": "Hi", "logprobs": 2}),
    (
        "/v1/chat/completions",
        chat,
        "chat_logprobs",
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
]


@pytest.mark.parametrize(("path", "module", "name", "fields"), FORMS, ids=["text", "chat"])
async def test_the_event_loop_runs_between_the_choices(
    monkeypatch: pytest.MonkeyPatch, path: str, module: Any, name: str, fields: dict[str, Any]
) -> None:
    turns: list[int] = []  # the loop's turns so far, when each choice was built
    num_turns = 0
    convert = getattr(module, name)

    def converted(*args: Any, **options: Any) -> Any:
        turns.append(num_turns)
        return convert(*args, **options)

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    position = TokenLogprobs(300, -0.5, 1, (300, 301), (-0.5, -1.5))
    async with running_app() as app:
        app.engine.max_model_len = 4096
        call = app.post(path, **fields, n=4, max_tokens=2000)
        await app.engine.next_stream()
        monkeypatch.setattr(module, name, converted)
        counting = asyncio.create_task(count())
        for stream in app.engine.streams:
            stream.put(*[300] * 500, end="length", logprobs=(position,) * 500)
        assert (await call.done()).status == 200
        counting.cancel()
        assert len(turns) == 4
        assert turns == sorted(set(turns))
        answer = json.loads(call.body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["completion_tokens"] == 4 * 500
