"""Files: uploaded through the SDK and byte by byte, listed, read, deleted, isolated by tenant."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import openai
import psutil
import pytest

from server.store import files
from server.store.database import Database, StoreError
from server.store.files import FileStore, StoredFile, new_file_id
from tests.servers import Server, http_post, running_server

LIMIT = 48 * 2**20
BOUNDARY = "X-BOUNDARY"


@pytest.fixture(scope="module")
def files_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("files") / "server.log"
    with running_server(log, "--max-file-bytes", str(LIMIT), "--max-body-bytes", "1MiB") as running:
        yield running


@pytest.fixture
def client(files_server: Server) -> Iterator[openai.OpenAI]:
    url = f"{files_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def left_over(server: Server) -> set[str]:
    directory = server.log.parent / "data" / "files"  # created with the first file
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def test_a_file_comes_back_as_it_went(client: openai.OpenAI, files_server: Server) -> None:
    contents = bytes(range(256)) * 40 + b"\r\n--X\r\n" * 3
    file = client.files.create(file=("../a dir/my file.bin", contents), purpose="user_data")
    assert (file.object, file.bytes, file.purpose) == ("file", len(contents), "user_data")
    assert (file.filename, file.status, file.expires_at) == ("my file.bin", "processed", None)
    assert client.files.content(file.id).read() == contents
    assert client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted
    for look in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            look(file.id)
        assert caught.value.code == "file_not_found"
    assert file.id not in left_over(files_server)


def test_pages_and_purposes(client: openai.OpenAI) -> None:
    ids = [
        client.files.create(file=(f"{n}", b"x"), purpose=purpose).id
        for n, purpose in enumerate(("batch", "vision", "batch", "vision", "batch"))
    ]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "the SDK turns the pages"
    first = client.files.list(limit=2, order="asc")
    assert ([file.id for file in first.data], first.has_more) == (ids[:2], True)
    batches = client.files.list(purpose="batch", order="asc", after=ids[0])
    assert ([file.id for file in batches.data], batches.has_more) == ([ids[2], ids[4]], False)
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.list(after="file-none")
    assert caught.value.param == "after"
    for limit in (0, 10_001):
        with pytest.raises(openai.BadRequestError) as caught:
            client.files.list(limit=limit)
        assert caught.value.param == "limit"
    for id in ids:
        client.files.delete(id)


def test_a_life_can_be_bounded(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 60}
        )
    assert caught.value.param == "expires_after.seconds"


def test_a_large_file_goes_to_the_disk_and_not_into_memory(
    client: openai.OpenAI, files_server: Server
) -> None:
    before = psutil.Process(files_server.process.pid).memory_info().rss
    file = client.files.create(file=("big", b"ab" * (LIMIT // 2)), purpose="user_data")
    after = psutil.Process(files_server.process.pid).memory_info().rss
    assert file.bytes == LIMIT, "far beyond the limit of other bodies"
    assert after - before < 16 * 2**20
    read = client.files.content(file.id).read()
    assert len(read) == LIMIT
    client.files.delete(file.id)
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("big", b"ab" * (LIMIT // 2) + b"c"), purpose="user_data")
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    assert left_over(files_server) == {file.id for file in client.files.list()}


def form(*parts: tuple[str, bytes], end: str = f"--{BOUNDARY}--\r\n") -> bytes:
    body = b""
    for head, contents in parts:
        body += f"--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode()
        body += contents + b"\r\n"
    return body + end.encode()


FILE = ('name="file"; filename="a"', b"contents")
PURPOSE = ('name="purpose"', b"batch")
SECONDS = ('name="expires_after[seconds]"', b"3600")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (form(FILE), "purpose", None),
        (form(FILE, ('name="purpose"', b"nonsense")), "purpose", None),
        (form(FILE, ('name="purpose"', b"batch_output")), "purpose", None),
        (form(PURPOSE), "file", None),
        (form(FILE, FILE, PURPOSE), "file", None),
        (form(FILE, ('name="purpose"', b"x" * 70_000)), "purpose", None),
        (form(FILE, PURPOSE, SECONDS), "expires_after.anchor", None),
        (form(FILE, PURPOSE, end=""), None, "invalid_form"),
        (form(FILE, PURPOSE)[:40], None, "invalid_form"),
        (form(*[(f'name="f{n}"', b"") for n in range(40)]), None, "invalid_form"),
        (form(("nameless", b"x")), None, "invalid_form"),
        (b"nothing of the kind", None, "invalid_form"),
        (b"", None, "invalid_form"),
    ],
)
def test_a_bad_form_is_named(
    files_server: Server, body: bytes, param: str | None, code: str | None
) -> None:
    files_server.get("/v1/files")  # the directory exists
    before = left_over(files_server) if (files_server.log.parent / "data/files").exists() else set()
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    answer = files_server.raw(http_post("/v1/files", body, content_type=kind))
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)
    assert left_over(files_server) == before


def test_only_forms_are_read(files_server: Server) -> None:
    for kind in ("application/json", "multipart/form-data", "text/plain"):
        answer = files_server.raw(http_post("/v1/files", b"{}", content_type=kind))
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


def test_an_upload_that_is_cut_off_leaves_nothing(files_server: Server) -> None:
    """Checked once the server has logged the end of the request.

    This does not depend on a fixed delay: both processes may be suspended for any time in between.
    """
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    whole = http_post("/v1/files", form(FILE, PURPOSE), "X-Request-Id: cut-off", content_type=kind)
    before = {file["id"] for file in files_server.get("/v1/files").json()["data"]}
    assert left_over(files_server) == before, "an upload of another test"
    with files_server.connect() as sock:
        sock.sendall(whole[:-30])
    await_end(files_server, "cut-off", lambda: left_over(files_server) - before)
    assert "POST /v1/files 499" in line_of(files_server, "cut-off")
    assert left_over(files_server) == before


def line_of(server: Server, request_id: str) -> str:
    """The log line for the end of a request; empty before."""
    lines = server.log.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.endswith(f" ms {request_id}")), "")


def await_end(server: Server, request_id: str, state: Callable[[], object]) -> None:
    """Wait until a request has ended.

    If it has not after a thousand other requests, fail with ``state`` and the stacks of the
    server's tasks.
    """
    for _ in range(1000):
        if line_of(server, request_id):
            return
        assert server.get("/health").status_code == 200
        time.sleep(0.01)
    held = state()
    server.process.send_signal(signal.SIGUSR1)
    for _ in range(200):
        if "these are all of" in server.log.read_text(errors="replace"):
            break
        time.sleep(0.05)
    raise AssertionError(f"{request_id} has not ended: {held}\n{server.log.read_text()[-20_000:]}")


def a_file(tenant: str, expires_at: int | None = None) -> StoredFile:
    """A file of one byte."""
    return StoredFile(
        id=new_file_id(),
        tenant=tenant,
        filename="f",
        purpose="batch",
        num_bytes=1,
        created_at=0,
        expires_at=expires_at,
    )


async def test_who_is_cancelled_leaves_no_contents_without_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client disconnects while a thread, which cannot be stopped, is working for it."""
    database = Database(tmp_path)
    store = FileStore(database)
    directory = tmp_path / "files"
    asked, may_go_on, is_done = threading.Event(), threading.Event(), threading.Event()

    def slow(work: Callable[..., object]) -> Callable[..., object]:
        def held_up(*args: object) -> object:
            asked.set()
            may_go_on.wait(20)
            try:
                return work(*args)
            finally:
                is_done.set()

        return held_up

    async def cancelled(work: Coroutine[object, object, object]) -> None:
        for event in (asked, may_go_on, is_done):
            event.clear()
        task = asyncio.create_task(work)
        await asyncio.to_thread(asked.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        await asyncio.to_thread(is_done.wait, 20)
        await asyncio.gather(*(each for each in asyncio.all_tasks() if each is not me))

    me = asyncio.current_task()
    with monkeypatch.context() as patch:
        patch.setattr(files._PendingFile, "create", slow(files._PendingFile.create))
        await cancelled(store.new_partial())
    assert list(directory.iterdir()) == []
    partial = await store.new_partial()
    file = a_file("me")
    with monkeypatch.context() as patch:
        patch.setattr("server.store.files._publish", slow(files._publish))
        await cancelled(store.add(file, partial))
    assert [path.name for path in directory.iterdir()] == [file.id]
    assert await store.get("me", file.id) == file
    await database.close()


def test_an_event_loop_that_ends_leaves_no_upload_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cancels all tasks, but its thread creates the file nevertheless."""
    make, asked, may_go_on = tempfile.mkstemp, threading.Event(), threading.Event()
    made: list[str] = []

    def slow(**options: object) -> tuple[int, str]:
        asked.set()
        may_go_on.wait(20)
        number, name = make(**options)
        made.append(name)
        return number, name

    monkeypatch.setattr(tempfile, "mkstemp", slow)

    async def begin() -> None:
        store = FileStore(Database(tmp_path))
        upload = asyncio.create_task(store.new_partial())
        await asyncio.to_thread(asked.wait, 20)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        may_go_on.set()

    asyncio.run(begin())
    assert made, "the thread has come to it"
    assert list((tmp_path / "files").iterdir()) == []


async def test_tenants_and_expiry(tmp_path: Path) -> None:
    database = Database(tmp_path)
    store = FileStore(database)

    async def add(tenant: str, expires_at: int | None = None) -> StoredFile:
        partial = await store.new_partial()
        partial.write_bytes(b"x")
        file = a_file(tenant, expires_at)
        await store.add(file, partial)
        return file

    mine, old = await add("me"), await add("me", expires_at=1)
    assert await store.get("me", mine.id) == mine
    assert await store.get("you", mine.id) is None
    assert await store.get("me", old.id) is None
    listing = {"purpose": None, "after": None, "limit": 9, "order": "asc"}
    assert await store.list("me", **listing) == [mine]
    assert await store.list("you", **listing) == []
    assert await store.list("you", **{**listing, "after": mine.id}) is None
    await store.sweep()
    assert [path.name for path in (tmp_path / "files").iterdir()] == [mine.id]
    await database.close()


async def test_contents_that_cannot_be_removed_keep_no_other_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(tmp_path)
    store = FileStore(database)
    expired = []
    for _ in range(3):
        partial = await store.new_partial()
        file = a_file("me", expires_at=1)
        await store.add(file, partial)
        expired.append(file)
    stuck = store.path(expired[0])
    stuck.unlink()
    stuck.mkdir()
    await store.sweep()
    assert list((tmp_path / "files").iterdir()) == [stuck]
    assert f"cannot remove {stuck}" in caplog.text
    with pytest.raises(StoreError):
        await store.delete(expired[0])
    await database.close()
