"""The command itself: help, wrong usage, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from server.access.key_file import KeyEntry, KeyFile, write_key_file
from server.cli import main
from server.cli.ray_cluster import _explain_no_cluster


def test_alone_it_tells_a_newcomer_what_to_do(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("quire serve", "quire chat", "quire complete", "quire bench"):
        assert command in out


def test_an_unknown_command_is_named(capsys):
    assert main(["sevre"]) == 2
    assert "no command 'sevre'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "bench"])
def test_each_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"quire {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "plan", "keys"])
def test_an_interpreter_without_the_packages_is_told_in_one_line(command):
    """For example the system's interpreter instead of the one in .venv."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "server", command], capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"quire {command}: the package '")
    assert "make install" in line


def test_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("quire ")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", [["version"], ["chat", "--help"], ["keys", "--file", "FILE", "list"]]
)
def test_a_reader_that_leaves_is_no_error(tmp_path, command, unbuffered):
    """As ``head`` does."""
    path = tmp_path / "keys.yaml"
    write_key_file(path, KeyFile(keys=[KeyEntry(name="anna", sha256=["0" * 64])]))
    command = [str(path) if word == "FILE" else word for word in command]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "server", *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", [["--help"], ["version"], ["chat", "--help"], ["keys", "--file", "FILE", "list"]]
)
def test_an_output_that_cannot_be_written_is_told_in_one_line(tmp_path, command, unbuffered):
    """On a full disk; nothing else is blamed for it, such as the key file."""
    path = tmp_path / "keys.yaml"
    write_key_file(path, KeyFile(keys=[KeyEntry(name="anna", sha256=["0" * 64])]))
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "server", *(str(path) if w == "FILE" else w for w in command)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    told = f"quire {command[0]}: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_the_engine_is_spawned_before_anything_else_is_imported():
    code = (
        "import sys; import server.cli; import server.cli.prestart; "
        "print(*{'asyncio', 'msgspec', 'pydantic', 'yaml', 'server.settings'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_nothing_heavy_is_imported_before_the_engine_is_told_what_to_load():
    """The engine learns it once this module is imported and the flags are parsed."""
    code = (
        "import sys; import server.cli.serve; from server.cli.flags import parse_settings; "
        "parse_settings([]); "
        "print(*{'torch', 'transformers', 'numpy', 'fastapi', 'uvicorn', 'tokenizers', 'httpx'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_talking_to_a_server_needs_no_library():
    code = (
        "import sys; import server.cli.chat; "
        "print(*(m for m in sys.modules if m.startswith(('pydantic', 'msgspec', 'httpx', 'yaml'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_where_no_ray_cluster_runs_our_own_flag_is_named(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    error = ConnectionError("Please specify the one to connect to by setting `--address` flag")
    told = _explain_no_cluster(None, error)
    assert "--ray-address or RAY_ADDRESS" in told
    assert "`--address`" not in told
    assert str(error) in _explain_no_cluster("10.0.0.1:6379", error)
