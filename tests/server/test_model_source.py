"""Model names: on disk, and on a fake Hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMIT = {"main": "1" * 40, "v2": "2" * 40}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"another library's",
    "tokenizer.json": b"{}",
    "tiny-Q4_K_M.gguf": b"GGUF four",
    "tiny-q8_0.gguf": b"GGUF eight",
}


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub that a download needs; ``org/gated`` requires a token."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        self.server.asked.append(self.path)
        if parts[0] == "api":
            repository, revision = (
                "/".join(parts[2:4]),
                parts[-1] if "revision" in parts else "main",
            )
        else:
            repository, revision = "/".join(parts[:2]), parts[3]
        if repository == "org/gated" and self.headers.get("authorization") != "Bearer hf_secret":
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if repository not in ("org/tiny", "org/gated"):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = COMMIT.get(revision, revision if revision in COMMIT.values() else None)
        if commit is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if parts[0] == "api" and "tree" in parts:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in FILES.items()
            ]
            return self.answer(200, json.dumps(tree).encode())
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in FILES]
            told = {"id": repository, "sha": commit, "siblings": siblings}
            return self.answer(200, json.dumps(told).encode())
        data = FILES["/".join(parts[4:])] + (b" v2" if commit == COMMIT["v2"] else b"")
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        return self.answer(200, data, headers)

    def answer(self, status, data, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(hub, home, *names, load_format="auto", **variables):
    """The result for each name, or its error, in a process that knows no other hub."""
    code = (
        "import sys; from engine.errors import ModelLoadError\n"
        "from server.model_source import resolve_model\n"
        "for name in sys.argv[2:]:\n"
        "    try: print(resolve_model(name, sys.argv[1]))\n"
        "    except ModelLoadError as error: print('refused:', error)\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home)}
    env |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, load_format, *names], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def names_in(directory):
    return sorted(str(p.relative_to(directory)) for p in Path(directory).rglob("*") if p.is_file())


def test_names_of_the_hub(hub, tmp_path):
    plain, tagged = resolve(hub, tmp_path, "org/tiny", "org/tiny@v2")
    (eight,) = resolve(hub, tmp_path / "eight", "org/tiny:Q8_0")
    assert names_in(plain) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(tagged) / "model.safetensors").read_bytes() == b"weights v2"
    assert Path(eight).name == "tiny-q8_0.gguf"
    assert Path(eight).read_bytes() == b"GGUF eight"
    (pickles,) = resolve(hub, tmp_path / "other", "org/tiny", load_format="bin")
    assert names_in(pickles) == ["config.json", "pytorch_model.bin", "tokenizer.json"]
    # What was fetched before is available without a network.
    asked = len(hub.asked)
    again, absent = resolve(hub, tmp_path, "org/tiny", "org/other", HF_HUB_OFFLINE="1")
    assert again == plain
    assert "HF_HUB_OFFLINE is set, and the model is not in the cache" in absent
    assert len(hub.asked) == asked


def test_what_the_hub_does_not_give_is_told_in_a_line(hub, tmp_path):
    names = ["org/none", "org/tiny@v9", "org/gated", "org/tiny:Q2_K", "org/tiny:q", "no//name"]
    expected = [
        "the Hub has no such model, or HF_TOKEN is needed to see it",
        "it has no revision v9",
        "it is gated: accept its terms on its page and set HF_TOKEN",
        "org/tiny:Q2_K: the model has no GGUF file with that in its name",
        "org/tiny:q: several files have that in their names: ",
        "there is no model directory no//name",
    ]
    for line, words in zip(resolve(hub, tmp_path, *names), expected, strict=True):
        assert line.startswith("refused: ")
        assert words in line
    (found,) = resolve(hub, tmp_path, "org/gated", HF_TOKEN="hf_secret")
    assert names_in(found) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_hub_out_of_reach(tmp_path):
    class Nowhere:
        server_port = 9  # nothing listens there

    (line,) = resolve(Nowhere, tmp_path, "org/tiny")
    assert line.startswith("refused: there is no directory org/tiny, and no model of the Hub: ")
