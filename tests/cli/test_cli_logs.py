"""Log lines cannot be forged, and JSON logs are JSON."""

from __future__ import annotations

import json
import logging
import sys

import msgspec
import pytest

from engine import logs
from engine.config import EngineConfig


@pytest.fixture
def _restored():
    """Restore the logging configuration."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = (root.handlers[:], root.level, logging.raiseExceptions, uvicorn.level)
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level, logging.raiseExceptions, uvicorn.level = before


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_logged_value_cannot_begin_a_line_or_steer_a_terminal(form, capsys):
    logs.configure("info", form)
    log = logging.getLogger("server.requests")
    log.info("path %s", "/x\n13:00:00 ERROR forged: line\x1b[2J\u2028é😀")
    log.debug("not told")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "\x1b" not in lines[0]
    if form == "json":
        assert json.loads(lines[0])["message"].startswith("path /x\n13:00:00 ERROR")
    else:
        assert "INFO server.requests: path /x\\n13:00:00" in lines[0]
        assert lines[0].endswith("é😀")


@pytest.mark.usefixtures("_restored")
def test_json_carries_fields_and_tracebacks_in_one_line(capsys):
    logs.configure("error", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        fields = {"fields": {"request_id": "r1", "odd": object}}
        logging.getLogger("x").exception("failed", extra=fields)
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["request_id"]) == ("error", "x", "r1")
    assert "ValueError: two" in entry["exception"]
    assert entry["time"].endswith("Z")


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("config", "rank", "writer"),
    [
        (EngineConfig(model="m"), 0, {}),
        (EngineConfig(model="m", replica=1, num_replicas=2), 0, {"engine": 1}),
        (EngineConfig(model="m", tensor_parallel_size=2), 1, {"rank": 1}),
        (
            EngineConfig(model="m", replica=0, num_replicas=2, pipeline_parallel_size=2),
            1,
            {"engine": 0, "rank": 1},
        ),
    ],
    ids=["alone", "engine", "rank", "rank of an engine"],
)
def test_a_line_says_which_of_several_processes_wrote_it(config, rank, writer, capsys):
    for form in ("text", "json"):
        told = msgspec.structs.replace(config, log_format=form)
        logs.configure_engine(told, rank)
        logging.getLogger("engine.core").info("serving")
    line, entry = capsys.readouterr().err.splitlines()
    numbers = ", ".join(f"{kind} {number}" for kind, number in writer.items())
    assert line[9:] == f"INFO {f'[{numbers}] ' if writer else ''}engine.core: serving"
    assert {kind: json.loads(entry).get(kind) for kind in ("engine", "rank")} == {
        "engine": writer.get("engine"),
        "rank": writer.get("rank"),
    }


@pytest.mark.usefixtures("_restored")
def test_a_full_disk_behind_the_log_ends_nothing(monkeypatch):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Full())
    logs.configure("info", "text")
    logging.getLogger("x").info("lost")
