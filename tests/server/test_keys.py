"""A key file: which keys are accepted, their rights, their limits and their usage."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.access.caller import Caller
from server.access.key_file import KeyEntry, KeyFile, read_key_file, write_key_file
from server.access.keyring import KeyRing
from server.cli import keys
from server.setting_sources import InvalidSettings
from tests.servers import MODEL, ROOT, Server, running_server

KEYS = {
    name: f"sk-quire-test-{name}"
    for name in ("anna", "boss", "files", "slow", "small", "spent", "late", "one")
}
HELLO = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest(), **fields}


ENTRIES = [
    entry("anna", weight=2),
    entry("boss", scopes=["inference", "metrics", "admin"]),
    entry("files", scopes=["files"]),
    entry("slow", requests_per_minute=2),
    entry("small", tokens_per_minute=40),
    entry("spent", tokens_per_day=8),
    entry("late", expires="2020-01-01"),
    entry("one", max_concurrent_requests=1),
]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with a key file, and the file."""
    home = tmp_path_factory.mktemp("keyed")
    path = home / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": ENTRIES}))
    flags = ("--api-key-file", str(path), "--data-dir", str(home))
    with running_server(home / "log", *flags, key="sk-root") as server:
        yield server, path


def call(server: Server, name: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return httpx.post(server.url + path, json={**HELLO, **fields}, headers=headers, timeout=60)


def get(server: Server, key: str, path: str) -> httpx.Response:
    return httpx.get(server.url + path, headers={"authorization": f"Bearer {key}"}, timeout=60)


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    told = answer.json()["error"]
    return answer.status_code, told["type"], told["code"]


# ---------------------------------------------------------------- rights


def test_a_key_does_what_its_scopes_say_and_no_more(keyed: tuple[Server, Path]) -> None:
    server, _ = keyed
    assert call(server, "anna").status_code == 200
    denied = 403, "permission_error", "insufficient_permissions"
    assert error_of(call(server, "files")) == denied
    for path in ("/metrics", "/v1/usage?tenant=*"):
        assert error_of(get(server, KEYS["anna"], path)) == denied
        assert get(server, KEYS["boss"], path).status_code == 200
        assert get(server, "sk-root", path).status_code == 200
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/ready", "/version", "/openapi.json"):
        assert get(server, KEYS["files"], path).status_code == 200
    assert error_of(call(server, "anna", "/stop_profile")) == denied
    assert error_of(get(server, KEYS["anna"], "/nothing"))[0] == 404


def test_unknown_and_expired_keys_are_none(keyed: tuple[Server, Path]) -> None:
    server, _ = keyed
    refused = 401, "authentication_error", "invalid_api_key"
    assert error_of(call(server, "late")) == refused
    assert error_of(get(server, "sk-quire-unknown", "/v1/models")) == refused
    assert error_of(get(server, ENTRIES[0]["sha256"], "/v1/models")) == refused


def test_a_key_may_come_as_anthropics_clients_send_it(keyed: tuple[Server, Path]) -> None:
    server, _ = keyed
    url = server.url + "/v1/models"
    assert httpx.get(url, headers={"x-api-key": KEYS["anna"]}).status_code == 200
    assert httpx.get(url, headers={"x-api-key": "sk-quire-no"}).status_code == 401
    both = {"x-api-key": KEYS["anna"], "authorization": "Basic x"}
    assert httpx.get(url, headers=both).status_code == 401


# ---------------------------------------------------------------- limits


def test_requests_beyond_the_rate_are_told_when_to_come_back(keyed: tuple[Server, Path]) -> None:
    server, _ = keyed
    first = call(server, "slow")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert call(server, "slow", stream=True).headers["x-ratelimit-remaining-requests"] == "0"
    refused = call(server, "slow")
    assert error_of(refused) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert call(server, "anna").status_code == 200, "another's limit is not theirs"
    assert get(server, KEYS["slow"], "/v1/models").status_code == 200, "looking costs nothing"


def test_tokens_beyond_the_rate_and_what_was_not_used_comes_back(
    keyed: tuple[Server, Path],
) -> None:
    server, _ = keyed
    answer = call(server, "small", max_tokens=30, stop=["\n"], ignore_eos=False)
    used = answer.json()["usage"]["total_tokens"]
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert answer.headers["x-ratelimit-limit-tokens"] == "40"
    assert left <= 40
    after = call(server, "small", "/tokenize", prompt="x", max_tokens=None)
    assert int(after.headers["x-ratelimit-remaining-tokens"]) >= 40 - used
    long = call(server, "small", prompt="a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3)
    assert error_of(long) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert long.headers["x-should-retry"] == "false"
    while call(server, "small", max_tokens=20).status_code == 200:
        pass
    refused = call(server, "small", max_tokens=20)
    assert error_of(refused) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1


def test_a_quota_is_used_up(keyed: tuple[Server, Path]) -> None:
    server, _ = keyed
    assert call(server, "spent", max_tokens=20).status_code == 200
    refused = call(server, "spent")
    assert error_of(refused) == (429, "rate_limit_error", "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    assert 0 < int(refused.headers["retry-after"]) <= 24 * 3600
    quota = get(server, KEYS["spent"], "/v1/usage").json()["tokens_per_day"]
    assert (quota["limit"], quota["remaining"]) == (8, 0)


def test_only_so_many_requests_at_once(keyed: tuple[Server, Path]) -> None:
    server, _ = keyed
    headers = {"authorization": f"Bearer {KEYS['one']}"}
    body = {**HELLO, "max_tokens": 1500, "stream": True}
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as held:
        pieces = held.iter_bytes()  # without a reference it would be closed, and the stream with it
        next(pieces)
        assert error_of(call(server, "one")) == (429, "rate_limit_error", "rate_limit_exceeded")
    deadline_s = time.monotonic() + 20
    while call(server, "one").status_code != 200:
        assert time.monotonic() < deadline_s, "the client has gone, and its place is not free"


# ---------------------------------------------------------------- usage


def test_usage_is_counted_by_owner_and_told_to_owner_and_admin(
    keyed: tuple[Server, Path],
) -> None:
    server, _ = keyed

    def row() -> dict[str, int]:
        rows = get(server, KEYS["anna"], "/v1/usage").json()["data"]
        assert {r["tenant"] for r in rows} <= {"anna"}
        return rows[-1] if rows else dict.fromkeys(("requests", "prompt_tokens"), 0)

    call(server, "anna")
    before = row()
    usage = call(server, "anna", n=2).json()["usage"]
    after = row()
    assert after["requests"] - before["requests"] == 1
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]
    assert after["completion_tokens"] - before["completion_tokens"] == usage["completion_tokens"]
    everybody = get(server, KEYS["boss"], "/v1/usage?tenant=*").json()["data"]
    assert {"anna", "spent"} <= {r["tenant"] for r in everybody}
    past = get(server, KEYS["anna"], "/v1/usage?start_date=2020-01-01&end_date=2020-12-31")
    assert past.json()["data"] == []
    first = get(server, KEYS["anna"], "/v1/usage?end_date=0001-01-05")
    assert (first.status_code, first.json()["data"]) == (200, [])
    bad = get(server, KEYS["anna"], "/v1/usage?start_date=monday")
    assert bad.json()["error"]["param"] == "start_date"
    metrics = get(server, KEYS["boss"], "/metrics").text
    assert (
        'quire:tenant_requests_total{engine="0",model_name="quire-demo",tenant="anna"}' in metrics
    )


# ---------------------------------------------------------------- changes to the file


def wait_until(condition: Any, what: str, limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never saw {what}"
        time.sleep(0.05)


def quire_keys(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "keys", "--file", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_keys_are_made_rotated_and_revoked_while_the_server_runs(
    keyed: tuple[Server, Path],
) -> None:
    server, path = keyed
    done = quire_keys(path, "create", "carl", "--tokens-per-minute", "100k", "--weight", "0.5")
    assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    assert key.startswith("sk-quire-")
    assert key not in path.read_text()
    wait_until(lambda: get(server, key, "/v1/models").status_code == 200, "the new key")
    assert quire_keys(path, "create", "carl").returncode == 1
    second = quire_keys(path, "rotate", "carl").stdout.strip()
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: get(server, second, "/v1/models").status_code == 200, "the second key")
    assert get(server, key, "/v1/models").status_code == 200
    listed = quire_keys(path, "list").stdout
    assert "tokens_per_minute=100000" in listed
    assert second not in listed
    # An invalid file changes nothing.
    text = path.read_text()
    path.write_text(text.replace("weight: 0.5", "weight: -1"))
    wait_until(lambda: "keeping the current keys" in server.tail(), "the complaint")
    assert get(server, key, "/v1/models").status_code == 200
    path.write_text(text)
    assert quire_keys(path, "revoke", "carl").returncode == 0
    wait_until(lambda: get(server, key, "/v1/models").status_code == 401, "the end of the key")
    assert get(server, second, "/v1/models").status_code == 401
    assert call(server, "anna").status_code == 200
    for name in KEYS.values():
        assert name not in server.log.read_text()


def test_workers_keep_to_one_limit_and_count_together(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write_key_file(
        path, KeyFile(keys=[KeyEntry.model_validate(entry("slow", requests_per_minute=2))])
    )
    flags = ("--api-key-file", str(path), "--data-dir", str(tmp_path), "--api-workers", "2")
    with running_server(tmp_path / "log", *flags, "--load-format", "stub", key="r") as server:
        # A connection each: the kernel distributes them over the workers.
        statuses = [call(server, "slow").status_code for _ in range(12)]
        assert sorted(statuses) == [200] * 2 + [429] * 10

        def usage() -> dict[str, int]:
            rows = get(server, "r", "/v1/usage?tenant=slow").json()["data"]
            return rows[-1] if rows else {}

        wait_until(lambda: usage().get("requests") == 2, "what both workers have counted")
        path.write_text(path.read_text().replace('"slow"', '"other"'))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: call(server, "slow").status_code == 200, "another's limits")
        wait_until(lambda: call(server, "slow").status_code == 200, "the same on each worker")


# ---------------------------------------------------------------- the file itself


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = KeyFile(
        keys=[
            KeyEntry(
                name="a@b",
                sha256=["0" * 64, "1" * 64],
                scopes=("files", "admin"),
                weight=2.5,
                expires=dt.datetime(2030, 1, 2, 3, 4, tzinfo=dt.UTC),
                tokens_per_day=10**9,
            ),
            KeyEntry(name="c", sha256=["2" * 64]),
        ]
    )
    for name in ("keys.yaml", "keys.toml"):
        write_key_file(tmp_path / name, file)
        assert read_key_file(tmp_path / name) == file
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ("[{name: a}]", "entry a: 'sha256'"),
        ("[{name: a, sha256: secret}]", "entry a: 'sha256'"),
        ("[{name: a/b, sha256: ONE}]", "entry a/b: 'name'"),
        ("[{name: a, sha256: ONE, scopes: [all]}]", "entry a: 'scopes'"),
        ("[{name: a, sha256: ONE, weight: 0}]", "entry a: 'weight'"),
        ("[{name: a, sha256: ONE, limit: 3}]", "entry a: 'limit'"),
        ("[{name: a, sha256: ONE, expires: soon}]", "entry a: 'expires'"),
        ("[{name: a, sha256: ONE}, {name: a, sha256: TWO}]", "twice"),
        ("[{name: a, sha256: ONE}, {name: b, sha256: ONE}]", "twice"),
        ("[1]", "entry 1:"),
        ("[", "cannot be parsed"),
        ("[{name: a, sha256: ONE, expires: 2027-02-30}]", "cannot be parsed: day is out of range"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_in_one_line(
    tmp_path: Path, entries: str, told: str
) -> None:
    path = tmp_path / "keys.yaml"
    text = entries.replace("ONE", f"'{1:064}'").replace("TWO", f"'{2:064}'")
    path.write_text(f"keys: {text}")
    with pytest.raises(InvalidSettings) as refused:
        read_key_file(path)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("expires", ["2020-01-01", "2020-01-01T10:00:00+02:00", "today"])
def test_a_key_that_has_expired_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expires: str
) -> None:
    """A date is its first moment, so today's has passed."""
    path = tmp_path / "keys.yaml"
    if expires == "today":
        expires = dt.datetime.now(dt.UTC).date().isoformat()
    create = ["--file", str(path), "create", "anna", "--expires"]
    assert keys.main([*create, expires]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("quire keys: expires: 20")
    assert "has passed" in told.err
    assert not path.exists()
    assert keys.main([*create, "2999-01-01"]) == 0
    assert read_key_file(path).keys[0].expires == dt.datetime(2999, 1, 1, tzinfo=dt.UTC)


def test_an_empty_list_of_scopes_makes_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell's variable that is not set must not give the scopes that a key has by default."""
    path = tmp_path / "keys.yaml"
    assert keys.main(["--file", str(path), "create", "anna", "--scopes", ""]) == 1
    assert capsys.readouterr().err.startswith("quire keys: scopes: must be 'inference'")
    assert not path.exists()


def test_a_ring_tells_its_keys_apart(tmp_path: Path) -> None:
    path = tmp_path / "keys.json.yaml"
    path.write_text(json.dumps({"keys": ENTRIES}))
    ring = KeyRing(["sk-root"], path)
    assert ring.requires_key
    anna, root = ring.find(KEYS["anna"].encode()), ring.find(b"sk-root")
    assert anna is not None
    assert root is not None
    assert (anna.tenant, root.tenant) == ("anna", "")
    for wrong in (
        b"",
        b"sk-roo",
        b"sk-root ",
        KEYS["late"].encode(),
        ENTRIES[0]["sha256"].encode(),
    ):
        assert ring.find(wrong) is None
    assert not KeyRing().requires_key


async def test_requests_are_answered_while_the_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of keys that takes a second."""
    path = tmp_path / "keys.json.yaml"
    path.write_text(json.dumps({"keys": []}))
    accepted = asyncio.Event()

    def make_caller(entry: KeyEntry) -> Caller:
        accepted.set()
        return Caller(entry.name)

    ring = KeyRing([], path, make_caller)
    begun, answered = threading.Event(), threading.Event()
    was_answered: list[bool] = []

    def read(path: Path) -> KeyFile:
        begun.set()
        was_answered.append(answered.wait(5))
        return read_key_file(path)

    monkeypatch.setattr("server.access.keyring.read_key_file", read)
    path.write_text(json.dumps({"keys": ENTRIES}))
    watch = asyncio.create_task(ring.watch())
    ring.reload()
    assert await asyncio.to_thread(begun.wait, 5)
    assert ring.find(KEYS["anna"].encode()) is None
    answered.set()
    await asyncio.wait_for(accepted.wait(), 5)
    assert was_answered == [True]
    watch.cancel()
