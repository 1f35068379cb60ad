"""Cross-origin requests: which origins are allowed, and the preflight response."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.settings import InvalidSettings, Settings
from tests.server.asgi import running_app

APP = "https://app.example"
PREFLIGHT = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def ask(method: str, path: str, headers: dict[str, str], **settings: Any) -> httpx.Response:
    async with running_app(api_keys=["sk-a"], **settings) as running:
        transport = httpx.ASGITransport(running.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.request(method, path, headers=headers)


async def test_the_preflight_of_a_welcome_page_needs_no_key() -> None:
    answer = await ask("OPTIONS", "/v1/chat/completions", PREFLIGHT, cors_origins=[APP])
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == APP
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"]
    assert allowed == PREFLIGHT["access-control-request-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("settings", [{}, {"cors_origins": ["https://other.example"]}])
async def test_other_pages_are_told_nothing(settings: dict[str, Any]) -> None:
    answer = await ask("OPTIONS", "/v1/chat/completions", PREFLIGHT, **settings)
    assert answer.status_code == 401
    assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(("origins", "told"), [([APP], APP), (["*"], "*")])
async def test_answers_and_errors_may_be_read_by_the_page(origins: list[str], told: str) -> None:
    for key, status in (("sk-a", 200), ("sk-b", 401)):
        headers = {"origin": APP, "authorization": f"Bearer {key}"}
        answer = await ask("GET", "/v1/models", headers, cors_origins=origins)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == told
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-should-retry"} <= set(exposed)
        assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://a b", "null/"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidSettings, match="--cors-origin"):
        Settings.load({"cors_origins": [origin]})
