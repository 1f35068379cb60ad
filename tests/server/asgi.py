"""The application without a socket: a fake engine under the test's control, and a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from engine.client import LoadProgress, RequestStream
from engine.errors import EngineDead, EngineError
from engine.images.types import ImageRules
from engine.snapshot import Snapshot
from engine.stats import BlockStats, EngineStats
from engine.types import EngineInfo, EngineOutput, MemoryPlan, Request, RequestOutput
from server.app import create_app
from server.settings import Settings

VOCAB = 4096


class FakeStream:
    """A stream whose outputs are supplied by a test."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.aborted = False
        self._outputs: asyncio.Queue[RequestOutput | EngineError] = asyncio.Queue()

    @property
    def request_id(self) -> str:
        return self.request.id

    def put(self, *token_ids: int, end: Any = None, **fields: Any) -> None:
        self._outputs.put_nowait(
            RequestOutput(id=self.request_id, token_ids=token_ids, finish_reason=end, **fields)
        )

    def fail(self, error: EngineError) -> None:
        self._outputs.put_nowait(error)

    async def next(self) -> RequestOutput:
        output = await self._outputs.get()
        if isinstance(output, EngineError):
            raise output
        return output

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self.put(end="abort")  # wakes the waiting reader


class FakeEngine:
    """An engine client; ``streams`` are the submitted requests, oldest first."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.submitted = asyncio.Event()
        self.loaded = asyncio.Event()
        self.alive = self.responsive = True
        self.activity = "serving"
        self.dead = False
        self.closed = False
        self.stats = EngineStats(blocks=BlockStats(total=8, free=8, block_size=16))
        self.start_error: EngineError | None = None
        self.max_model_len = 64
        self.images: ImageRules | None = None
        self.num_looks = 0
        self._snapshot: Snapshot | None = None
        self._shown = asyncio.Event()
        self.listeners: list[Callable[[EngineOutput], None]] = []

    @property
    def members(self) -> Sequence[FakeEngine]:
        return (self,)

    @property
    def info(self) -> EngineInfo:
        memory = MemoryPlan(
            weights_bytes=0,
            kv_cache_bytes=0,
            free_bytes=0,
            bytes_per_token=1,
            num_blocks=8,
            block_size=16,
            max_model_len=self.max_model_len,
        )
        return EngineInfo(
            model="fake",
            architecture="fake",
            num_parameters=0,
            dtype="float32",
            device="cpu",
            attention_backend="none",
            vocab_size=VOCAB,
            max_model_len=self.max_model_len,
            eos_token_ids=(),
            memory=memory,
            fingerprint="fp_fake",
            load_s=0.0,
            images=self.images,
        )

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        await self.loaded.wait()
        if self.start_error is not None:
            raise self.start_error
        return self.info

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        if not self.alive:
            raise EngineDead("gone")
        streams = [FakeStream(request) for request in requests]
        self.streams += streams
        self.submitted.set()
        return list(streams)

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        self.listeners.append(listener)

    async def snapshot(self) -> Snapshot:
        if not self.alive:
            raise EngineDead("gone")
        self.num_looks += 1
        await self._shown.wait()
        assert self._snapshot is not None
        return self._snapshot

    def show(self, snapshot: Snapshot) -> None:
        """Return this snapshot from now on, also to callers that are waiting for one."""
        self._snapshot = snapshot
        self._shown.set()

    async def close(self) -> None:
        self.closed = True

    async def next_stream(self) -> FakeStream:
        """The stream of the next submitted request."""
        await self.submitted.wait()
        self.submitted.clear()
        return self.streams[-1]


class Exchange:
    """One request to the application, and its response so far."""

    def __init__(
        self,
        app: FastAPI,
        method: str,
        path: str,
        body: bytes,
        content_type: str = "application/json",
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._news = asyncio.Event()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(b"host", b"t"), (b"content-type", content_type.encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        self.body += message.get("body", b"")
        self._news.set()

    async def until(self, text: bytes) -> None:
        """Wait until the body contains ``text``."""
        while text not in self.body:
            self._news.clear()
            await self._news.wait()

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def done(self) -> Exchange:
        await self.task
        return self

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class Application:
    """A running application over a fake engine."""

    def __init__(self, app: FastAPI, engine: FakeEngine) -> None:
        self.app = app
        self.engine = engine
        self.state = app.state.server

    def request(self, method: str, path: str, body: bytes = b"") -> Exchange:
        return Exchange(self.app, method, path, body)

    async def get(self, path: str) -> Exchange:
        return await self.request("GET", path).done()

    def post(self, path: str, **fields: Any) -> Exchange:
        return self.request("POST", path, json.dumps({"model": "quire-demo", **fields}).encode())

    async def metric(self, name: str) -> float:
        """A sample's value, summed over its labels."""
        lines = (await self.get("/metrics")).body.decode().splitlines()
        found = [line for line in lines if line.startswith((f"quire:{name}{{", f"quire:{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in found)


@asynccontextmanager
async def running_app(
    *, loaded: bool = True, engine: FakeEngine | None = None, **settings: Any
) -> AsyncIterator[Application]:
    """Run an application with a fake engine for the duration of the block."""
    engine = engine or FakeEngine()
    if loaded:
        engine.loaded.set()
    app = create_app(Settings(**settings), engine)
    async with app.router.lifespan_context(app):
        application = Application(app, engine)
        if loaded:
            await application.state.model()
        yield application
    assert engine.closed
