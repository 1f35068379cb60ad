"""Applications with a vision model over a fake engine, and the images they are sent."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from engine.images.types import AreaScaling, ImageRules
from engine.types import Request
from tests.server.asgi import Application, Exchange, FakeEngine, running_app
from tests.servers import MODEL
from tests.tiny_vision import IMAGE
from tests.tiny_vision_text import QWEN, save_text

RULES = ImageRules(
    token_id=IMAGE,
    cell=4,
    scaling=AreaScaling(min_pixels=16, max_pixels=64 * 64),
    max_images=3,
)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def png(color: str = "red", size: tuple[int, int] = (8, 12)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


RED, BLUE = png("red"), png("blue", (4, 4))


def shown(data: bytes = RED, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any], role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts), **more}


def block(data: bytes = RED, media_type: str = "image/png") -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": media_type, "data": encoded},
    }


@asynccontextmanager
async def seeing(
    home: Path,
    *,
    template: str = QWEN,
    rules: ImageRules | None = RULES,
    strict: bool = False,
    **tokenizer: Any,
) -> AsyncIterator[Application]:
    """An application whose model accepts images."""
    save_text(home / MODEL, template, **tokenizer)
    engine = FakeEngine()
    engine.images, engine.max_model_len = rules, 400
    settings = {"model": str(home / MODEL), "data_dir": home / "data", "strict": strict}
    async with running_app(engine=engine, **settings) as app:
        yield app


async def answered(exchange: Exchange, app: Application) -> tuple[Request, dict[str, Any]]:
    """The request that the engine receives, and the response once that has ended."""
    taken = asyncio.ensure_future(app.engine.next_stream())
    await asyncio.wait([taken, exchange.task], return_when="FIRST_COMPLETED")
    assert taken.done(), exchange.body
    stream = taken.result()
    stream.put(5, end="length")
    await exchange.done()
    assert exchange.status == 200, exchange.body
    return stream.request, json.loads(exchange.body)


def prompt_text(app: Application, request: Request) -> str:
    tokenizer = app.state._model.tokenizer
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


SIX = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"  # RED, in cells of 4
ONE = "<|vision_start|><|image_pad|><|vision_end|>"  # BLUE


def shown_in_responses(data: bytes = RED, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), "detail": "auto", **more}


def responses_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def responses_user(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts), **more}
