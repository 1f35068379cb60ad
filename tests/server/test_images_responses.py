"""Images in /v1/responses and in conversations: seen, stored, continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.images.read import read_image
from server.store.files import StoredFile, new_file_id
from tests.server.showing import (
    BLUE,
    ONE,
    RED,
    RESPONSES,
    RULES,
    SIX,
    answered,
    prompt_text,
    responses_text,
    responses_user,
    seeing,
    shown_in_responses,
)


async def test_responses_go_on_from_what_was_shown(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        asked = [responses_user(responses_text("What?"), shown_in_responses())]
        request, answer = await answered(app.post(RESPONSES, input=asked), app)
        assert f"user\nWhat?{SIX}<|im_end|>" in prompt_text(app, request)
        assert answer["usage"]["input_tokens"] == len(request.prompt_token_ids)

        items = (await app.get(f"{RESPONSES}/{answer['id']}/input_items")).body
        assert json.loads(items)["data"][0]["content"][1] == shown_in_responses(file_id=None)

        output = {"type": "function_call_output", "call_id": "c"}
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        more = [call, {**output, "output": [responses_text("so"), shown_in_responses(BLUE)]}]
        exchange = app.post(RESPONSES, input=more, previous_response_id=answer["id"])
        request, _ = await answered(exchange, app)
        prompt = prompt_text(app, request)
        assert len(request.images) == 2
        assert prompt.index(SIX) < prompt.index(f"tool\nso{ONE}")


async def test_conversations_keep_images(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        item = {"type": "message", **responses_user(shown_in_responses())}
        made = json.loads((await app.post("/v1/conversations").done()).body)
        await app.post(f"/v1/conversations/{made['id']}/items", items=[item]).done()
        asked = app.post(RESPONSES, input="And?", conversation=made["id"])
        request, _ = await answered(asked, app)
        assert len(request.images) == 1


async def test_an_uploaded_file_is_shown_and_may_be_deleted_afterwards(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        files = app.state.files
        stored: dict[str, StoredFile] = {}
        for name, data in (("red.png", RED), ("notes.txt", b"no")):
            partial = await files.new_partial()
            partial.write_bytes(data)
            about = {"tenant": "", "filename": name, "purpose": "vision", "created_at": 1}
            stored[name] = StoredFile(id=new_file_id(), num_bytes=len(data), **about)
            await files.add(stored[name], partial)

        named = {"type": "input_image", "file_id": stored["red.png"].id}
        request, answer = await answered(app.post(RESPONSES, input=[responses_user(named)]), app)
        assert request.images[0].digest == read_image(RED, RULES).digest
        await files.delete(stored["red.png"])
        listed = (await app.get(f"{RESPONSES}/{answer['id']}/input_items")).body
        exchange = app.post(RESPONSES, input=json.loads(listed)["data"])  # as it is listed
        request, _ = await answered(exchange, app)
        assert request.images[0].digest == read_image(RED, RULES).digest
        exchange = app.post(RESPONSES, input="And?", previous_response_id=answer["id"])
        request, _ = await answered(exchange, app)
        assert request.images[0].digest == read_image(RED, RULES).digest

        for name, words in (("red.png", "not stored here"), ("notes.txt", "is no image")):
            item = responses_user({**named, "file_id": stored[name].id})
            refused = await app.post(RESPONSES, input=[item]).done()
            assert (refused.status, refused.error["param"]) == (400, "input.0")
            assert words in refused.error["message"]


@pytest.mark.parametrize(("item", "param", "words"), [
    (responses_user({"type": "input_image", "image_url": "http://x/"}), "input.0.content",
     "nothing is fetched"),
    (responses_user({"type": "input_image", "file_id": "file-1"}), "input.0", "not stored here"),
    (responses_user({"type": "input_image"}), "input.0.content", "'image_url'"),
    (responses_user(shown_in_responses(detail="fine")), "input.0.content", ""),
    (responses_user(shown_in_responses(b"no")), "input", "neither PNG"),
    ({"role": "system", "content": [shown_in_responses()]}, "input.0.content", "user's alone"),
    ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
     "input.0.output", "'image_url'"),
])  # fmt: skip
async def test_a_bad_item_is_named(
    tmp_path: Path, item: dict[str, Any], param: str, words: str
) -> None:
    async with seeing(tmp_path) as app:
        exchange = await app.post(RESPONSES, input=[item]).done()
        assert exchange.status == 400
        assert exchange.error["param"].startswith(param)
        assert words in exchange.error["message"]


async def test_a_responses_detail_is_reported(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        items = [responses_user(responses_text("a"), shown_in_responses(detail="high"))]
        exchange = app.post(RESPONSES, input=items, include=["message.input_image.image_url"])
        await answered(exchange, app)
        assert exchange.headers["x-quire-ignored-params"] == "input.0.content.1.detail"
