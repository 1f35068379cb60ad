"""The document at /openapi.json: self-contained, and consistent with the routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.asgi import Application, running_app
from tests.server.test_access import walk


def references(node: Any) -> set[str]:
    """Every ``$ref`` below ``node``."""
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set[str]().union(*map(references, node)) if isinstance(node, list) else set()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


@pytest.fixture(params=[(), ("sk-a",)], ids=["open", "with keys"])
async def application(request: pytest.FixtureRequest):
    async with running_app(api_keys=list(request.param)) as application:
        yield application


async def test_every_operation_tells_its_answers(application: Application) -> None:
    document = application.app.openapi()
    asks_for_keys = bool(application.state.settings.api_keys)
    for method, path, operation in operations(document):
        where = f"{method} {path}"
        answers = operation["responses"]
        assert {"200", "400", "408", "413", "415", "431", "500", "503"} <= set(answers), where
        assert "422" not in answers, where
        is_open = path in ("/health", "/dashboard")
        assert ("401" in answers) == (asks_for_keys and not is_open), where
        assert operation["summary"], where
        assert operation["description"], where
        assert answers["200"]["content"], where
        for status, answer in answers.items():
            if status >= "4":
                schema = answer["content"]["application/json"]["schema"]
                name = "MessagesError" if path.startswith("/v1/messages") else "Error"
                assert schema == {"$ref": f"#/components/schemas/{name}"}, where
    assert ("security" in document) == asks_for_keys


async def test_what_is_referred_to_is_there_and_what_is_there_is_referred_to(
    application: Application,
) -> None:
    document = application.app.openapi()
    prefix = "#/components/schemas/"
    named = {ref.removeprefix(prefix) for ref in references(document)}
    assert named == set(document["components"]["schemas"])


OFF = {
    "/start_profile",
    "/stop_profile",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/dashboard",
    "/dashboard/state",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reload_weights",
    "/update_weights_from_disk",
}


async def test_what_settings_switch_off_is_not_described(tmp_path: Path) -> None:
    options = {
        "profile": str(tmp_path),
        "lora_dir": str(tmp_path),
        "dashboard": True,
        "enable_sleep_mode": True,
    }
    async with running_app(**options, api_keys=["sk-a"]) as application:
        document = application.app.openapi()
        told = {(method, path) for method, path, _ in operations(document)}
        prefix = "#/components/schemas/"
        named = {ref.removeprefix(prefix) for ref in references(document)}
        assert named == set(document["components"]["schemas"])
    async with running_app(api_keys=["sk-a"], dashboard=False) as application:
        left = {(method, path) for method, path, _ in operations(application.app.openapi())}
    assert left < told
    assert {path for _, path in told - left} == OFF
    assert "/v1/usage" not in {path for _, path in told}  # no key file


async def test_other_names_are_described_as_what_they_name(application: Application) -> None:
    paths = application.app.openapi()["paths"]
    for name in ("/rerank", "/v2/rerank"):
        assert paths[name]["post"]["responses"] == paths["/v1/rerank"]["post"]["responses"]
        assert paths[name]["post"]["requestBody"] == paths["/v1/rerank"]["post"]["requestBody"]
    assert paths["/score"]["post"]["requestBody"] == paths["/v1/score"]["post"]["requestBody"]


async def test_every_route_that_answers_is_described(application: Application) -> None:
    """Undescribed routes are pages for people, the document itself, or disabled."""
    described = set(application.app.openapi()["paths"])
    served = {path for path, _ in walk(application.app.routes)}
    people = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
    left = {path.replace(":path}", "}") for path in served - people} - described
    assert left - OFF <= {"/v1/usage"}


async def test_a_body_that_cannot_be_empty_is_required(application: Application) -> None:
    paths = application.app.openapi()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]
    assert body["required"]
    schema = body["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatRequest"}
    stream = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    data, done = stream["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    shapes = data["contentSchema"]["anyOf"]
    assert [shape["$ref"].rsplit("/", 1)[1] for shape in shapes] == ["ChatChunk", "Error"]
    assert done == {"const": "[DONE]"}
