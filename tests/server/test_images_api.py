"""Images in the requests of each API: what the engine receives, and what is rejected."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from engine.images.read import read_image
from engine.images.types import PlaceholderRewrite, TileRewrite, TileScaling
from server.images import ImageDecoder
from server.media_budget import MediaBudget
from tests.server.showing import (
    BLUE,
    CHAT,
    MESSAGES,
    ONE,
    RED,
    RESPONSES,
    RULES,
    SIX,
    answered,
    block,
    data_url,
    png,
    prompt_text,
    responses_text,
    responses_user,
    seeing,
    shown,
    shown_in_responses,
    text,
    user,
)
from tests.tiny_vision import END, IMAGE, START
from tests.tiny_vision_text import MISTRAL, QWEN, THREE_NEWLINES, TURN


async def test_text_and_images_keep_their_order(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        messages = [
            user(text("Compare "), shown(RED), text(" with "), shown(BLUE), text(".")),
            {"role": "assistant", "content": "How?"},
            user(text("one"), text("two")),
        ]
        exchange = app.post(CHAT, messages=messages, max_tokens=1)
        request, answer = await answered(exchange, app)
        assert prompt_text(app, request) == (
            f"<|im_start|>user\nCompare {SIX} with {ONE}.<|im_end|>\n"
            "<|im_start|>assistant\nHow?<|im_end|>\n"
            "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
        )
        first, second = request.images
        ids = request.prompt_token_ids
        assert ids[first.start - 1] == START
        assert ids[first.start + first.num_tokens] == END
        assert (first.num_tokens, first.height, first.width) == (6, 12, 8)
        assert second.num_tokens == 1
        assert ids[second.start - 1 : second.start + 2] == (START, IMAGE, END)
        assert first.pixels == Image.new("RGB", (8, 12), "red").tobytes()
        assert first.digest == read_image(RED, RULES).digest
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert await app.metric("prompt_images_total") == 2
        assert await app.metric("prompt_tokens_total") == len(ids)


async def test_choices_share_the_images_and_streams_have_them(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        messages = [user(shown())]
        fields = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        exchange = app.post(CHAT, n=2, stream=True, **fields)
        await app.engine.next_stream()
        for stream in app.engine.streams:
            stream.put(5, end="length")
        await exchange.done()
        first, second = (stream.request for stream in app.engine.streams)
        assert first.images == second.images != ()
        assert first.prompt_token_ids == second.prompt_token_ids
        chunk = json.loads(exchange.body.split(b"\n")[0].removeprefix(b"data: "))
        assert tuple(chunk["prompt_token_ids"]) == first.prompt_token_ids


@pytest.mark.parametrize("url", [
    data_url(RED).upper().replace(data_url(RED).upper().partition(",")[2],
                                  data_url(RED).partition(",")[2]),
    data_url(RED, "x-unknown"),
    data_url(RED).replace(";base64", ";name=a.png;base64"),
    "data:image;base64," + data_url(RED).partition(",")[2],
    data_url(RED).rstrip("="),
    data_url(RED)[:60] + "\n " + data_url(RED)[60:],
])  # fmt: skip
async def test_data_urls_are_read_as_browsers_do(tmp_path: Path, url: str) -> None:
    async with seeing(tmp_path) as app:
        part = {"type": "image_url", "image_url": {"url": url}}
        request, _ = await answered(app.post(CHAT, messages=[user(part)], max_tokens=1), app)
        assert request.images[0].digest == read_image(RED, RULES).digest


async def test_other_spellings_of_an_image_part(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        for part in (
            {"type": "input_image", "image_url": data_url(RED)},
            {"type": "image_url", "image_url": data_url(RED)},
        ):
            asked = app.post(CHAT, messages=[user(part)], max_tokens=1)
            request, _ = await answered(asked, app)
            assert len(request.images) == 1


HTTP = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}


@pytest.mark.parametrize(("messages", "param", "words"), [
    ([user(HTTP)], "messages.0.content", "nothing is fetched"),
    ([user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})],
     "messages.0.content", "nothing is fetched"),
    ([user({"type": "image_url", "image_url": {"url": base64.b64encode(RED).decode()}})],
     "messages.0.content", "data:image/...;base64,"),
    ([user({"type": "image_url", "image_url": {"url": "data:application/pdf;base64,AAAA"}})],
     "messages.0.content", "data:image/"),
    ([user({"type": "image_url", "image_url": {"url": "data:image/png,%89PNG"}})],
     "messages.0.content", ";base64,"),
    ([user({"type": "image_url", "image_url": {"url": 5}})], "messages.0.content", "part 0"),
    ([user({"type": "image_url"})], "messages.0.content", "part 0"),
    ([user(text("a"), shown(detail="fine"))], "messages.0.content", "part 1: its detail"),
    ([user({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}})],
     "messages.0.content", "image 1 of 1: the image is empty"),
    ([user(shown(), {"type": "image_url", "image_url": {"url": "data:image/png;base64,A*A="}})],
     "messages.0.content", "image 2 of 2: the image is not in base64"),
    ([user({"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}})],
     "messages.0.content", "not in base64"),
    ([user(shown()), user(shown(b"GIF8 no"))], "messages.1.content", "neither PNG"),
    ([user(shown(RED[:-30]))], "messages.0.content", "damaged or cut off"),
    ([user(shown(png(size=(4, 2000))))], "messages.0.content", "too narrow"),
    ([user(*[shown()] * 4)], "messages", "holds 4 images; at most 3"),
    ([user(shown(png(size=(64, 64))), shown(png(size=(60, 60))))], "messages",
     "context length is 400 tokens"),
    ([user(shown(), role="system"), user(text("x"))], "messages.0.content", "of the system"),
    ([user(text("x")), user(shown(), role="assistant")], "messages.1.content",
     "of the assistant"),
    ([user({"type": "video_url"})], "messages.0.content", "data:video/"),
    ([user({"type": "input_video"})], "messages.0.content", "'input_video'"),
])  # fmt: skip
async def test_what_cannot_be_shown_is_named(
    tmp_path: Path, messages: list[Any], param: str, words: str
) -> None:
    async with seeing(tmp_path) as app:
        for path in (CHAT, "/tokenize"):
            exchange = await app.post(path, messages=messages).done()
            if path == "/tokenize" and "context length" in words:
                assert exchange.status == 200
                continue
            assert (exchange.status, exchange.error["param"]) == (400, param), exchange.body
            assert words in exchange.error["message"]
        assert not app.engine.streams


@pytest.mark.parametrize(
    "fields", [{"truncate_prompt_tokens": 5}, {"use_beam_search": True}], ids=lambda f: min(f)
)
async def test_what_has_no_place_beside_images(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with seeing(tmp_path) as app:
        exchange = await app.post(CHAT, messages=[user(shown())], **fields).done()
        assert (exchange.status, exchange.error["param"]) == (400, min(fields))


async def test_a_model_without_images_says_so(tmp_path: Path) -> None:
    async with seeing(tmp_path, rules=None) as app:
        for path, fields, param in (
            (CHAT, {"messages": [user(shown())]}, "messages.0.content"),
            ("/tokenize", {"messages": [user(shown())]}, "messages.0.content"),
            (RESPONSES, {"input": [responses_user(shown_in_responses())]}, "input"),
        ):
            exchange = await app.post(path, **fields).done()
            assert (exchange.status, exchange.error["param"]) == (400, param)
            assert "this model takes none here; send text" in exchange.error["message"]
        exchange = await app.post(MESSAGES, messages=[user(block())], max_tokens=1).done()
        assert exchange.status == 400
        assert "this model takes none here" in exchange.error["message"]


@pytest.mark.parametrize(("template", "shows"), [
    ("{% for m in messages %}{{ m.role }}{% endfor %}", 0),
    (QWEN + "<|image_pad|>", 2),
])  # fmt: skip
async def test_a_template_that_shows_another_number_of_images(
    tmp_path: Path, template: str, shows: int
) -> None:
    async with seeing(tmp_path, template=template) as app:
        exchange = await app.post(CHAT, messages=[user(shown())]).done()
        assert (exchange.status, exchange.error["param"]) == (400, "messages")
        assert f"shows {shows} images of 1" in exchange.error["message"]


async def test_a_template_of_mistrals_kind(tmp_path: Path) -> None:
    async with seeing(tmp_path, template=MISTRAL) as app:
        messages = [{"role": "system", "content": "Look."}, user(text("What?"), shown(BLUE))]
        request, _ = await answered(app.post(CHAT, messages=messages, max_tokens=1), app)
        wanted = "Look.<|im_start|>What?<|image_pad|><|im_end|>"
        assert prompt_text(app, request) == wanted


async def test_a_spelling_of_the_placeholder_stays_text(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        messages = [user(text("<|image_pad|>"), shown(BLUE)), user(text("<|image_pad|>"))]
        request, _ = await answered(app.post(CHAT, messages=messages, max_tokens=1), app)
        assert request.prompt_token_ids.count(IMAGE) == 1
        assert prompt_text(app, request).count("<|image_pad|>") == 3


async def test_what_stands_for_an_image_is_rewritten_before_it_is_tokenised(tmp_path: Path) -> None:
    """As Gemma's processors do, if there are images at all."""
    rewriting = PlaceholderRewrite("<|vision_start|>", "\n\n<|vision_start|>")
    rules = msgspec.structs.replace(RULES, rewriting=rewriting)
    async with seeing(tmp_path, rules=rules) as app:
        asked = app.post(CHAT, messages=[user(shown(), text("<|vision_start|>"))], max_tokens=1)
        request, _ = await answered(asked, app)
        wanted = f"<|im_start|>user\n\n\n{SIX}<|vision_start|><|im_end|>\n<|im_start|>assistant\n"
        assert prompt_text(app, request) == wanted
        ids = request.prompt_token_ids
        assert ids.count(START) == 1
        assert ids[request.images[0].start - 2] == THREE_NEWLINES
        request, _ = await answered(app.post(CHAT, messages=[user(text("a"))], max_tokens=1), app)
        assert "\n\n" not in prompt_text(app, request)


async def test_an_image_in_tiles_is_one_image(tmp_path: Path) -> None:
    """Its tiles have their tokens, and only images are counted and limited."""
    rewriting = TileRewrite(
        "<|image_pad|>",
        tile="{row}.{column}<|image_pad|>",
        whole="all<|image_pad|>",
        alone="<|image_pad|>",
        begin="(",
        end=")",
    )
    changes = {"scaling": TileScaling(8, 16), "rewriting": rewriting, "max_images": 1}
    rules = msgspec.structs.replace(RULES, **changes)
    async with seeing(tmp_path, rules=rules) as app:
        messages = [user(shown(png(size=(20, 10))), text("<|image_pad|>"))]
        request, answer = await answered(app.post(CHAT, messages=messages, max_tokens=1), app)
        four = "<|image_pad|>" * 4
        tiles = f"<|vision_start|>(1.1{four}1.2{four}all{four})<|vision_end|><|image_pad|>"
        assert tiles in prompt_text(app, request)
        assert [image.num_tokens for image in request.images] == [4, 4, 4]
        assert request.prompt_token_ids.count(IMAGE) == 12
        assert answer["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
        assert await app.metric("prompt_images_total") == 1
        exchange = await app.post(CHAT, messages=[user(shown(), shown())]).done()
        assert "holds 2 images; at most 1" in exchange.error["message"]
    async with seeing(tmp_path, rules=rules, template="{{ messages[0].role }}") as app:
        exchange = await app.post(CHAT, messages=[user(shown())]).done()
        assert (exchange.status, exchange.error["param"]) == (400, "messages")
        assert "shows 0 images of 1" in exchange.error["message"]


async def test_special_tokens_and_images_are_both_counted(tmp_path: Path) -> None:
    async with seeing(tmp_path, bos_token="<|im_start|>", add_bos_token=True) as app:
        asked = app.post(CHAT, messages=[user(shown())], max_tokens=1, add_special_tokens=True)
        request, _ = await answered(asked, app)
        assert request.prompt_token_ids[:2] == (TURN, TURN)
        assert request.prompt_token_ids[request.images[0].start - 1] == START


async def test_detail_is_reported(tmp_path: Path) -> None:
    asked = {"messages": [user(text("a"), shown(detail="low"))], "max_tokens": 1}
    name = "messages.0.content.1.image_url.detail"
    async with seeing(tmp_path) as app:
        exchange = app.post(CHAT, **asked)
        await answered(exchange, app)
        assert exchange.headers["x-quire-ignored-params"] == name
        exchange = app.post(CHAT, messages=[user(shown(detail="auto"))], max_tokens=1)
        await answered(exchange, app)
        assert "x-quire-ignored-params" not in exchange.headers
    async with seeing(tmp_path, strict=True) as app:
        exchange = await app.post(CHAT, **asked).done()
        assert (exchange.status, exchange.error["param"]) == (400, name)


async def test_tokens_are_counted_with_the_images(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        exchange = await app.post("/tokenize", messages=[user(text("a"), shown())]).done()
        tokens = json.loads(exchange.body)["tokens"]
        assert tokens.count(IMAGE) == 6
        messages = [user(text("a"), block())]
        exchange = await app.post(MESSAGES + "/count_tokens", messages=messages).done()
        assert json.loads(exchange.body) == {"input_tokens": len(tokens)}
        items = [responses_user(responses_text("a"), shown_in_responses())]
        exchange = await app.post(RESPONSES + "/input_tokens", input=items).done()
        assert json.loads(exchange.body)["input_tokens"] == len(tokens)


async def test_a_stored_chat_tells_what_it_was_shown(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        messages = [user(text("a"), shown(detail="high")), user(text("b"), text("c"))]
        _, answer = await answered(app.post(CHAT, messages=messages, max_tokens=1, store=True), app)
        kept = json.loads((await app.get(f"{CHAT}/{answer['id']}/messages")).body)["data"]
        assert (kept[0]["content"], kept[1]["content"]) == ("a", "b\nc")
        assert kept[0]["content_parts"] == [text("a"), shown(detail="high")]
        assert kept[1]["content_parts"] is None


# ------------------------------------------------------------ Anthropic's API


async def test_blocks_of_messages(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), block(BLUE)]}
        messages = [
            user(block(), text("What?")),
            {"role": "assistant", "content": [call]},
            user(result),
        ]
        request, answer = await answered(app.post(MESSAGES, messages=messages, max_tokens=1), app)
        prompt = prompt_text(app, request)
        assert f"user\n{SIX}What?<|im_end|>" in prompt
        assert f"tool\nseen{ONE}<|im_end|>" in prompt
        assert answer["usage"]["input_tokens"] == len(request.prompt_token_ids)


@pytest.mark.parametrize(("source", "words"), [
    ({"type": "url", "url": "http://169.254.169.254/"}, "nothing is fetched"),
    ({"type": "file", "file_id": "file_1"}, "not stored here"),
    ({"type": "base64", "media_type": "image/bmp", "data": ""}, "image/webp"),
    ({"type": "base64", "media_type": "image/png", "data": None}, "'data'"),
    ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "neither PNG"),
    (None, "'source'"),
])  # fmt: skip
async def test_a_bad_block_is_named(tmp_path: Path, source: Any, words: str) -> None:
    async with seeing(tmp_path) as app:
        bad = {"type": "image", "source": source}
        for content in ([bad], [{"type": "tool_result", "tool_use_id": "t", "content": [bad]}]):
            messages = [{"role": "user", "content": content}]
            exchange = await app.post(MESSAGES, messages=messages, max_tokens=1).done()
            assert exchange.status == 400
            assert words in exchange.error["message"]


# ------------------------------------------------------------ memory and logs


async def test_pixels_in_flight_are_bounded_and_given_back(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        num_bytes = 8 * 12 * 3
        app.state.media = MediaBudget(num_bytes)
        asked = {"messages": [user(shown())], "max_tokens": 1}
        first = app.post(CHAT, **asked)
        stream = await app.engine.next_stream()
        second = await app.post(CHAT, **asked).done()
        assert (second.status, second.error["code"]) == (503, "server_is_overloaded")
        assert "MiB of images, videos and audio in flight" in second.error["message"]
        assert await app.metric("admission_rejections_total") == 1
        textual = app.post(CHAT, messages=[user(text("x"))], max_tokens=1)
        await answered(textual, app)
        stream.put(5, end="length")
        await first.done()
        await answered(app.post(CHAT, **asked), app)
        assert app.state.num_live_sequences == 0


async def test_an_image_is_read_once_and_forgotten_when_there_is_no_room() -> None:
    encoded = base64.b64encode(RED).decode()
    size = 8 * 12 * 3
    reader = ImageDecoder(cache_bytes=2 * size)
    first = await reader.decode(encoded, RULES)
    assert await reader.decode(encoded, RULES) is first
    for color in ("green", "white"):
        await reader.decode(base64.b64encode(png(color)).decode(), RULES)
    again = await reader.decode(encoded, RULES)
    assert again is not first
    assert again == first
    reader.close()


async def test_nothing_of_an_image_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with seeing(tmp_path) as app:
        await answered(app.post(CHAT, messages=[user(shown())], max_tokens=1), app)
        await app.post(CHAT, messages=[user(shown(RED[:-30]))]).done()
    assert base64.b64encode(RED).decode()[20:40] not in caplog.text
