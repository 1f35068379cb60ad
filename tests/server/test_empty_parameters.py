"""Query parameters without a value, which the JavaScript SDKs send for ``null``."""

from __future__ import annotations

import re

import pytest
from fastapi.routing import APIRoute

from server.http.query import without_empty_values
from tests.server.asgi import Application, running_app


def gets_with_parameters(served: Application) -> dict[str, list[str]]:
    """The parameters of each GET route that has any, by its path."""
    found = {}
    for route in served.app.state.described:
        assert isinstance(route, APIRoute)
        names = [field.alias for field in route.dependant.query_params]
        if names and "GET" in route.methods:
            found[re.sub(r"\{\w+\}", "none", route.path)] = names
    return found


async def test_they_count_as_left_out_on_every_route(tmp_path) -> None:
    async with running_app(data_dir=tmp_path) as served:
        gets = gets_with_parameters(served)
        lists = {"/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/chat/completions"}
        assert lists < set(gets)
        for path, names in gets.items():
            if path == "/dashboard/state":
                continue  # waits for an engine that reports
            plain = await served.get(path)
            empty = await served.get(f"{path}?{'&'.join(f'{name}=' for name in names)}")
            assert (empty.status, empty.body) == (plain.status, plain.body), path
            assert plain.status == (200 if path in lists else 404), path


async def test_wrong_values_are_still_refused(tmp_path) -> None:
    async with running_app(data_dir=tmp_path) as served:
        for path, name in (
            ("/v1/batches?after=&limit=0", "limit"),
            ("/v1/batches?after=batch_x&limit=", "after"),
            ("/v1/messages/batches?before_id=msgbatch_x&after_id=", "before_id"),
            ("/v1/files?order=up&after=", "order"),
        ):
            answer = await served.get(path)
            assert (answer.status, f"'{name}'" in answer.error["message"]) == (400, True), path


@pytest.mark.parametrize(
    ("query", "rest"),
    [
        (b"", b""),
        (b"a=", b""),
        (b"a=&b=1&c=", b"b=1"),
        (b"a=1&b=", b"a=1"),
        (b"a==", b"a=="),
        (b"stream", b"stream"),
        (b"a=1&b=x%3D", b"a=1&b=x%3D"),
        (b"a=&", b""),
        (b"metadata[mood]=&a=", b"metadata[mood]="),
        (b"a=&metadata%5Bmood%5D=", b"metadata%5Bmood%5D="),
    ],
)
def test_what_is_left_of_a_query(query: bytes, rest: bytes) -> None:
    assert without_empty_values(query) == rest
