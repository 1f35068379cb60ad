"""Nothing can be written: neither stored nor put aside for the length of a request."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.server.asgi import Exchange, running_app

LONG = b'{"model": "quire-demo", "prompt": "' + b"word " * 600_000 + b'"}'
FORM = (
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n\r\nhello\r\n'
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--x--\r\n'
)


@pytest.mark.parametrize(
    ("path", "body", "content_type"),
    [
        ("/v1/completions", LONG, "application/json"),
        ("/v1/files", FORM, "multipart/form-data; boundary=x"),
    ],
)
async def test_what_cannot_be_put_anywhere_is_a_503_that_names_no_directory(
    path: str,
    body: bytes,
    content_type: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    async with running_app() as app:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
        answer = await Exchange(app.app, "POST", path, body, content_type).done()
        assert answer.status == 503
        assert answer.error["code"] == "storage_unavailable"
        assert "no temporary directory can be written" in answer.error["message"]
        assert "/" not in answer.error["message"]
        short = await app.post("/v1/completions", prompt="").done()
        assert short.status == 400, "what is short needs none"
