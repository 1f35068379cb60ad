"""``quire serve`` as a process: its output, its failures, its shutdown."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.paths import default_model_dir
from server.cli.progress import LoadDisplay, display_url
from server.cli.serve import bind
from tests import forked

SERVE = [sys.executable, "-m", "server", "serve"]
SMALL = ["--kv-cache-memory-bytes", "32MiB", "--num-threads", "1"]


def run_to_end(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=120)


def test_from_start_to_sigterm():
    """It prints a curl command that works verbatim, and leaves nothing behind."""
    process = subprocess.Popen(
        [*SERVE, "--port", "0", "--api-key", "YOUR_KEY", *SMALL],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "-d '{" in line:
                break
        told = "".join(lines)
        match = re.search(r"Quire serves quire-demo at (http://127\.0\.0\.1:\d+) ", told)
        assert match, told
        assert "memory: weights" in told
        command = told[told.index("\ncurl ") :]
        if shutil.which("curl"):
            answer = subprocess.run(
                ["bash", "-c", command], capture_output=True, check=True, timeout=60
            )
            message = json.loads(answer.stdout)["choices"][0]["message"]
            assert message["role"] == "assistant"
            assert message["content"]
        chat = [sys.executable, "-m", "server", "chat", "--url", match[1], "--api-key"]
        done = subprocess.run(
            [*chat, "YOUR_KEY", "Hello"], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip()
        refused = subprocess.run([*chat, "wrong", "Hello"], capture_output=True, text=True)
        assert refused.returncode == 1
        assert "401: A valid API key is required; give one with --api-key" in refused.stderr
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0
        assert psutil.wait_procs(family, timeout=10)[1] == []
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def test_a_json_log_is_one_object_a_line_from_start_to_end():
    """What is written to people otherwise, the address above all, is a record too."""
    process = subprocess.Popen(
        [*SERVE, "--port", "0", "--log-format", "json", *SMALL], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        records = []
        for line in process.stderr:
            records.append(json.loads(line))
            if records[-1]["message"] == "serving":
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
    (ready,) = [record for record in records if record["message"] == "serving"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", ready["url"])
    assert (ready["model"], ready["dashboard"]) == ("quire-demo", ready["url"] + "/dashboard")


def test_why_a_start_failed_is_a_record_of_a_json_log():
    done = run_to_end("/no/such/model", "--port", "0", "--log-format", "json")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    record = json.loads(line)
    told = "there is no model directory /no/such/model"
    assert (record["level"], record["message"]) == ("critical", told)


def test_a_busy_port_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # The model does not exist: this error would come after that of a busy port.
        done = run_to_end("/no/such/model", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr == (
        f"quire serve: cannot listen on 127.0.0.1:{port}: address already in use; "
        "--port names another, and 0 any free one\n"
    )


@pytest.mark.parametrize("broken", ["model.safetensors", "tokenizer.json"])
def test_a_model_that_cannot_be_loaded_ends_it_with_one_line(broken, tmp_path):
    """The first is read by the engine process, the second by the API process."""
    model = tmp_path / "model"
    shutil.copytree(default_model_dir(), model)
    os.truncate(model / broken, (model / broken).stat().st_size // 2)
    done = run_to_end(str(model), "--port", "0", "--log-level", "error", *SMALL)
    assert done.returncode == 1, done.stderr
    problems = [line for line in done.stderr.splitlines() if "quire serve:" in line]
    assert len(problems) == 1
    assert broken in problems[0]
    assert "Traceback" not in done.stderr
    assert "Quire serves" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/no/such/model"], "there is no model directory /no/such/model"),
        (["/no/such.gguf"], "there is no GGUF file /no/such.gguf"),
        ([__file__], "is not a GGUF file"),
        ([os.path.dirname(__file__)], "holds no config.json and no GGUF file, so no model"),
        (["--port", "http"], "--port: must be a valid integer, not 'http'"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--chat-template", "/no.jinja"], "cannot read /no.jinja: No such file or directory"),
        (["--tokenizer", "/no/x"], "--tokenizer: /no/x is neither a directory nor a GGUF file"),
        (["--lora-dir", "/no/adapters"], "--lora-dir: /no/adapters is not a directory"),
        (["--lora", "a"], "--lora: must be NAME=DIRECTORY, not 'a'\n"),
        (["--lora", "a=/no/adapter"], "--lora a: there is no adapter_config.json in /no/adapter"),
        (["--weights-dir", "demo"], "--weights-dir needs --enable-sleep-mode"),
        (
            ["--enable-sleep-mode", "--weights-dir", "/no/weights"],
            "--weights-dir: /no/weights is not a directory",
        ),
        (
            ["--enable-sleep-mode", "--weights-dir", "demo", "--load-format", "bin"],
            "--weights-dir cannot be used with --load-format bin",
        ),
        (
            ["--tool-call-parser", "harmony", "--reasoning-parser", "none"],
            "--tool-call-parser harmony needs --reasoning-parser harmony",
        ),
        (
            ["--tool-call-parser", "hermes", "--reasoning-parser", "harmony"],
            "--reasoning-parser harmony needs --tool-call-parser harmony",
        ),
        (
            ["--data-dir", f"{__file__}/data"],
            f"--data-dir: cannot store in {__file__}/data: Not a directory",
        ),
        (
            ["--profile", f"{__file__}/traces"],
            f"--profile: cannot write to {__file__}/traces: Not a directory",
        ),
        (["nowhere.yaml"], "cannot read nowhere.yaml: No such file or directory"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(arguments, told, capsys):
    """The engine process, which is already running by then, is ended."""
    from server.cli import main

    forked.prepare()
    before = psutil.Process().children(recursive=True)
    assert main(["serve", "--port", "0", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quire serve: ")
    assert told in error
    assert psutil.Process().children(recursive=True) == before
    assert error.count("\n") == 1


def test_a_template_that_cannot_be_parsed_is_told_with_its_line(tmp_path, capsys):
    from server.cli import main

    path = tmp_path / "broken.jinja"
    path.write_text("{% for message in messages %}\n{{ message.content }}\n{% endif %}")
    assert main(["serve", "--port", "0", "--chat-template", str(path)]) == 1
    error = capsys.readouterr().err
    assert "broken.jinja is no template: " in error
    assert "endif" in error
    assert "(line 3)" in error


def test_binding_is_listening():
    with bind("localhost", 0)[0] as sock:
        socket.create_connection(sock.getsockname()[:2]).close()
    assert display_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert display_url("::1", 80) == "http://[::1]:80"


def test_a_name_of_both_kinds_of_address_is_listened_to_on_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As localhost on most systems, whose resolvers put ::1 first."""
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bind("localhost", 0)[0] as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


class Terminal:
    def __init__(self, terminal: bool) -> None:
        self.text = ""
        self.isatty = lambda: terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_is_one_line_redrawn_at_a_terminal_and_few_lines_elsewhere():
    for is_terminal in (True, False):
        stream = Terminal(is_terminal)
        display = LoadDisplay(stream=stream)
        for step in range(101):
            display(step / 100, "model.safetensors")
        display.line("done")
        assert stream.text.endswith("done\n")
        assert stream.text.count("\n") <= 3
        assert ("100% █" in stream.text) is is_terminal


def test_where_there_is_no_terminal_a_slow_load_tells_a_line_now_and_then(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("server.cli.progress.time.monotonic", lambda: now_s)
    stream = Terminal(False)
    display = LoadDisplay(stream=stream)
    for step in range(51):
        display(step / 100, "model.safetensors")
        now_s += 0.125
    assert (
        stream.text == " 16%  model.safetensors\n 32%  model.safetensors\n 48%  model.safetensors\n"
    )


def test_progress_that_begins_late_and_ends_soon_is_not_told(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("server.cli.progress.time.monotonic", lambda: now_s)
    stream = Terminal(False)
    display = LoadDisplay(stream=stream)
    now_s += 10.0  # the engine process imports torch
    display(0.0, "loading model.safetensors")
    now_s += 1.0
    display(1.0, "loading model.safetensors")
    assert stream.text == ""


def test_progress_goes_on_when_nobody_can_read_it():
    class Full(Terminal):
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    display = LoadDisplay(stream=Full(False))
    display(0.5, "model.safetensors")
    display.line("done")


def test_presets_named_in_the_documentation_exist():
    root = Path(__file__).parents[2]
    for page in (root / "docs").glob("*.md"):
        for name in re.findall(r"configs/[\w./-]+\.(?:yaml|yml|json)", page.read_text()):
            assert (root / name).exists(), f"{page.name} names {name}"
