"""A small HTTP server that streams by a script, including faults; it shares no code with ours."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class Script:
    """How the server behaves, and a record of its requests."""

    fault: str | None = None  # for completion requests
    every: int = 1  # every how many of them the fault occurs
    tokenizes: bool = True
    closes: bool = False  # closes a connection when it is reused
    url: str = ""
    asked: list[dict] = field(default_factory=list)
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    generated: int = 0
    handlers: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called for each connection."""
        task = asyncio.create_task(self._serve_and_close(reader, writer))
        self.handlers.add(task)

    async def _serve_and_close(self, reader, writer) -> None:
        try:
            await self.serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, request after request."""
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for served in itertools.count():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if served and self.closes:
                    return
                length = next(
                    int(line.partition(":")[2])
                    for line in head.splitlines()
                    if line.lower().startswith("content-length")
                )
                body = await reader.readexactly(length)
                method, path, _ = head.split(" ", 2)
                await self._answer(writer, method, path, json.loads(body) if body else {})
                await writer.drain()

    async def _answer(self, writer, method, path, body) -> None:
        if path == "/v1/models":
            return _send(writer, 200, json.dumps({"data": [{"id": "m"}]}))
        if path == "/metrics":
            text = (
                f'vllm:generation_tokens_total{{model_name="m"}} {self.generated}\n'
                f'vllm:num_requests_running{{model_name="m"}} {self.in_flight}\n'
            )
            return _send(writer, 200, text)
        if path == "/tokenize" and self.tokenizes:
            count = len(body["prompt"].split())
            return _send(writer, 200, json.dumps({"tokens": list(range(100, 100 + count))}))
        if method != "POST" or not path.endswith("completions"):
            return _send(writer, 404, json.dumps({"error": {"message": "no"}}))
        self.asked.append(body)
        faulty = self.fault if len(self.asked) % self.every == 0 else None
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self._stream(writer, body, faulty)
        finally:
            self.in_flight -= 1
        return None

    async def _stream(self, writer, body, fault) -> None:
        if fault == "busy":
            return _send(writer, 503, json.dumps({"error": {"message": "busy"}}))
        count = body["max_tokens"] - (fault == "short")
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chat = "messages" in body
        if chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(count):
            if index == 1 and fault == "cut":
                return writer.transport.abort()
            if index == 1 and fault == "error":
                _event(writer, {"error": {"message": "broken"}})
                break
            if index == 1 and fault == "garbage":
                _chunk(writer, b"data: {nonsense\n\n")
            _chunk(writer, b": heartbeat\n\n")
            piece = {"delta": {"content": "x"}} if chat else {"text": "x"}
            _event(writer, {"choices": [{"index": 0, "finish_reason": None, **piece}]})
            await asyncio.sleep(0)
            self.generated += 1
        if fault != "no finish":
            _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if fault != "no usage":
            prompt = body.get("prompt") or body["messages"][0]["content"].split()
            length = len(prompt if isinstance(prompt, list) else prompt.split())
            usage = {"prompt_tokens": length, "completion_tokens": count}
            details = {"prompt_tokens_details": {"cached_tokens": 3}}
            _event(writer, {"choices": [], "usage": {**usage, **details}})
        if fault != "no done":
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return None


@contextlib.asynccontextmanager
async def scripted_server(script: Script) -> AsyncIterator[Script]:
    """Run ``script`` as a server on a free port, and set its ``url``."""
    server = await asyncio.start_server(script.accept, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for handler in script.handlers:
            handler.cancel()
        await asyncio.gather(*script.handlers, return_exceptions=True)


def _send(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    payload = body.encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)


def _event(writer: asyncio.StreamWriter, event: dict) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
