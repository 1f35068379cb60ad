"""``quire run-batch``: a file of requests into a file of answers, and resuming it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.servers import MODEL, ROOT

CHAT = "/v1/chat/completions"


def run(*argv: str | Path, piped: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "run-batch", *map(str, argv)]
    return subprocess.run(
        command, cwd=ROOT, input=piped, capture_output=True, text=True, timeout=120
    )


def chat_line(custom_id: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_a_file_of_requests_is_answered_and_gone_on_with(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "The", "max_tokens": 2}
    completion = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    source = write(
        tmp_path / "in.jsonl",
        *(chat_line(f"{n}") for n in range(6)),
        completion,
        chat_line("bad", temperature=9),
    )
    output = tmp_path / "out.jsonl"
    done = run(source, "-o", output, "--num-threads", "1")
    assert done.returncode == 1, done.stderr
    assert "1 of 8 requests failed" in done.stderr
    assert "8/8 requests" in done.stderr
    assert "\r" not in done.stderr  # no bar in a pipe
    results = read(output)
    assert len(results) == 8
    assert results["bad"]["response"]["body"]["error"]["param"] == "temperature"
    answer = results["0"]["response"]["body"]["choices"][0]["message"]["content"]
    assert "Paris" in answer
    assert results["c"]["response"]["body"]["usage"]["completion_tokens"] == 2

    # Cut off in the middle of a line, with the failed request corrected.
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    kept = {i: line for i, line in read_whole(lines[:4]).items() if i != "bad"}
    write(source, *(chat_line(f"{n}") for n in range(6)), completion, chat_line("bad"))
    refused = run(source, "-o", output)
    assert (refused.returncode, "--resume" in refused.stderr) == (1, True)
    # Through a pipe, which can be read only once.
    resumed = ("-i", "/dev/stdin", "-o", output, "--resume", "--num-threads", "1")
    done = run(*resumed, piped=source.read_text())
    assert done.returncode == 0, done.stderr
    results = read(output)
    assert len(results) == 8
    assert all(results[i] == line for i, line in kept.items()), "an answer was made again"

    before = output.read_bytes()
    done = run(source, "-o", output, "--resume", "--max-model-len", "1T")  # loading would fail
    assert (done.returncode, output.read_bytes()) == (0, before), done.stderr
    assert "all 8 requests are done already" in done.stderr


def read_whole(lines: list[bytes]) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line for line in map(json.loads, lines)}


def test_an_input_at_fault_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", chat_line("a"), chat_line("a"), {"custom_id": "b"})
    output = tmp_path / "out.jsonl"
    done = run(source, "-o", output)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert "line 2: " in first
    assert "line 3: " in second
    assert not output.exists()
    missing = run(tmp_path / "none.jsonl", "-o", output)
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
    assert run("-o", output).returncode == 2
    good = write(tmp_path / "good.jsonl", chat_line("a"))
    before = good.read_bytes()
    done = run(good, "-o", good, "--overwrite")
    assert (done.returncode, "is the input" in done.stderr) == (1, True)
    assert good.read_bytes() == before
    done = run(good, "-o", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"{tmp_path} is a directory; name a file" in done.stderr
