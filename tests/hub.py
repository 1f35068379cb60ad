"""A fake of the Hugging Face Hub, as far as downloads need one."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_COMMITS = {"main": "1" * 40, "v2": "2" * 40}


class FakeHub(ThreadingHTTPServer):
    """Repositories of two revisions; in that of the tag ``v2``, files end with `` v2``.

    ``org/gated`` requires a token.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[str] = []  # paths, with their queries
        self.gives_weights = threading.Event()  # until it is set, files of weights are held back
        self.gives_weights.set()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that knows no other hub, and has its cache in ``home``."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        address = f"http://127.0.0.1:{self.server_port}"
        return env | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[FakeHub]:
    """Run a hub with these files, by name, during the block."""
    server = FakeHub(repositories)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.gives_weights.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        self.server.asked.append(self.path)
        if parts[0] == "api":
            repository = "/".join(parts[2:4])
            revision = parts[-1] if "revision" in parts else "main"
        else:
            repository, revision = "/".join(parts[:2]), parts[3]
        if repository == "org/gated" and self.headers.get("authorization") != "Bearer hf_secret":
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        files = self.server.repositories.get(repository)
        if files is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = _COMMITS.get(revision, revision if revision in _COMMITS.values() else None)
        if commit is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if parts[0] == "api" and "tree" in parts:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in files.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in files]
            told = {"id": repository, "sha": commit, "siblings": siblings}
            return self.answer(200, json.dumps(told).encode())
        name = "/".join(parts[4:])
        data = files[name] + (b" v2" if commit == _COMMITS["v2"] else b"")
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        if self.command == "GET" and name.endswith(".safetensors"):
            self.server.gives_weights.wait()
        return self.answer(200, data, headers)

    def answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
