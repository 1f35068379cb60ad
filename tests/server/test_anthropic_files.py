"""Files of Anthropic's clients: uploaded, listed, named in messages, and deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.images.read import read_image
from server.store.files import StoredFile, new_file_id
from tests.server.showing import MESSAGES, RED, RULES, answered, seeing, user
from tests.servers import MODEL, Server

HEADERS = {"anthropic-version": "2023-06-01"}
TEXT = b"The capital of France is Paris.\n"


def call(server: Server, method: str, path: str = "/v1/files", **fields: Any) -> httpx.Response:
    return httpx.request(method, server.url + path, headers=HEADERS, timeout=60, **fields)


def upload(server: Server, name: str = "facts.txt", data: bytes = TEXT, **form: Any) -> Any:
    answer = call(server, "POST", files={"file": (name, data)}, data=form)
    assert answer.status_code == 200, answer.text
    return answer.json()


def named(id: str, kind: str = "document", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "source": {"type": "file", "file_id": id}, **fields}


def count(server: Server, *content: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": list(content)}]}
    return call(server, "POST", "/v1/messages/count_tokens", json=body)


def test_a_file_is_described_as_its_clients_expect(server: Server) -> None:
    file = upload(server)
    assert {**file, "id": "", "created_at": ""} == {
        **{"id": "", "type": "file", "filename": "facts.txt", "mime_type": "text/plain"},
        **{"size_bytes": len(TEXT), "created_at": "", "expires_at": None, "downloadable": True},
    }
    assert file["created_at"].endswith("Z")
    assert call(server, "GET", f"/v1/files/{file['id']}").json() == file
    assert call(server, "GET", f"/v1/files/{file['id']}/content").content == TEXT
    as_openai_sees_it = server.get(f"/v1/files/{file['id']}").json()
    assert (as_openai_sees_it["object"], as_openai_sees_it["purpose"]) == ("file", "user_data")
    deleted = call(server, "DELETE", f"/v1/files/{file['id']}")
    assert deleted.json() == {"id": file["id"], "type": "file_deleted"}
    missing = call(server, "GET", f"/v1/files/{file['id']}")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert "request-id" in missing.headers


def test_a_file_may_expire(server: Server) -> None:
    assert upload(server, expires_in_seconds="3600")["expires_at"].endswith("Z")
    for wrong in ("60", "7776001", "soon"):
        files, form = {"file": ("a.txt", b"a")}, {"expires_in_seconds": wrong}
        refused = call(server, "POST", files=files, data=form)
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        assert "'expires_in_seconds' must be" in refused.json()["error"]["message"]


def test_files_are_listed_by_pages(server: Server) -> None:
    ids = [upload(server, f"{number}.txt")["id"] for number in range(3)][::-1]  # newest first

    def listed(**query: Any) -> tuple[list[str], Any]:
        answer = call(server, "GET", params={"limit": 2, **query})
        assert answer.status_code == 200, answer.text
        return [file["id"] for file in answer.json()["data"]], answer.json()

    first, page = listed()
    assert (first, page["has_more"], page["last_id"]) == (ids[:2], True, ids[1])
    assert listed(page=page["next_page"])[0][0] == ids[2]
    assert listed(after_id=ids[1])[0][0] == ids[2]
    before, page = listed(before_id=ids[2])
    assert (before, page["has_more"]) == (ids[:2], False)
    assert listed(**{"ids[]": [ids[2], "file-none", ids[0]]})[0] == [ids[2], ids[0]]
    for wrong in ({"page": "page_none"}, {"page": ids[0], "after_id": ids[0]}, {"scope_id": "s"}):
        refused = call(server, "GET", params=wrong)
        assert (refused.status_code, refused.json()["type"]) == (400, "error")


def test_a_document_may_be_a_file(server: Server) -> None:
    id = upload(server)["id"]
    source = {"type": "text", "media_type": "text/plain", "data": TEXT.decode()}
    for title in (None, "Facts"):
        found = count(server, named(id, title=title, context="Of old."))
        assert "x-quire-ignored-params" not in found.headers
        document = {"type": "document", "source": source, "context": "Of old."}
        assert found.json() == count(server, {**document, "title": title or "facts.txt"}).json()
    result = {"type": "tool_result", "tool_use_id": "t", "content": [named(id)]}
    plain = {**result, "content": [{"type": "document", "source": source, "title": "facts.txt"}]}
    assert count(server, result).json() == count(server, plain).json()
    asked = [{"role": "user", "content": [named(id), {"type": "text", "text": "What is it?"}]}]
    body = {"model": MODEL, "max_tokens": 2, "messages": asked}
    assert call(server, "POST", "/v1/messages", json=body).status_code == 200


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (named("file-none"), "'messages.0.content' names the file 'file-none', which is not"),
        (named(""), "'file_id'"),
        ({"type": "image", "source": {"type": "file"}}, "'file_id'"),
    ],
)
def test_a_file_that_is_not_there(server: Server, block: dict[str, Any], problem: str) -> None:
    refused = count(server, block)
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
    assert problem in refused.json()["error"]["message"]


def test_files_of_another_kind_are_refused(server: Server) -> None:
    pdf = upload(server, "a.pdf", b"%PDF-1.7")["id"]
    for block, problem in ((named(pdf), "is a PDF"), (named(pdf, "image"), "is no image")):
        refused = count(server, block)
        assert (refused.status_code, problem in refused.text) == (400, True)


async def test_an_image_may_be_a_file(tmp_path: Path) -> None:
    async with seeing(tmp_path) as app:
        partial = await app.state.files.new_partial()
        partial.write_bytes(RED)
        about = {"tenant": "", "filename": "red.png", "purpose": "user_data", "created_at": 1}
        file = StoredFile(id=new_file_id(), num_bytes=len(RED), **about)
        await app.state.files.add(file, partial)
        inner = {"type": "content", "content": [named(file.id, "image")]}
        for block in (named(file.id, "image"), {"type": "document", "source": inner}):
            exchange = app.post(MESSAGES, messages=[user(block)], max_tokens=1)
            request, _ = await answered(exchange, app)
            assert request.images[0].digest == read_image(RED, RULES).digest
