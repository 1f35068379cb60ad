"""How the processes of a server log: lines for people or for machines, on standard error.

A library leaves logging to its user; only the programs (the command line, the engine's process)
call :func:`configure`. Neither form lets a logged value begin a line of its own: control
characters are escaped.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

from engine.config import EngineConfig, LogFormat, LogLevel

# Which of several processes of a kind writes, by kind: {"engine": 1, "rank": 0}.
Writer = Mapping[str, int]
_ONLY_ONE: Writer = {}


def configure(level: LogLevel, form: LogFormat, writer: Writer = _ONLY_ONE) -> None:
    """Send all logging to standard error, replacing what was configured before.

    Args:
        level: of the least that is told.
        form: of the lines.
        writer: told in each line, where others of its kind write to the same place.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(writer) if form == "json" else TextFormatter(writer))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn tells at "info" what our own lines tell better.
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "WARNING")
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk behind stderr must not end a request


def configure_engine(config: EngineConfig, rank: int = 0) -> None:
    """``configure`` for a process that computes a model, or a part of one."""
    writer: dict[str, int] = {}
    if config.num_replicas > 1:
        writer["engine"] = config.replica
    if config.num_ranks > 1:
        writer["rank"] = rank
    configure(config.log_level, config.log_format, writer)


class TextFormatter(logging.Formatter):
    """``12:00:00 WARNING server.app: message``, with the traceback indented below; where there are
    several writers ``12:00:00 WARNING [engine 1, rank 0] engine.core: message``.
    """

    def __init__(self, writer: Writer = _ONLY_ONE) -> None:
        super().__init__()
        self._writer = f"[{_named(writer)}] " if writer else ""

    def format(self, record: logging.LogRecord) -> str:
        """One record; only its traceback takes further lines."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        whose = f"{self._writer}{record.name}"
        line = f"{clock} {record.levelname} {whose}: {_escape(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line += "".join(f"\n    {_escape(row)}" for row in trace)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``.

    What is passed as ``extra={"fields": {...}}`` becomes keys of its own, and so does the writer.
    """

    def __init__(self, writer: Writer = _ONLY_ONE) -> None:
        super().__init__()
        self._writer = writer

    def format(self, record: logging.LogRecord) -> str:
        """One record on one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._writer,
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _named(writer: Writer) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in writer.items())


def _escape(text: str) -> str:
    """Control characters as ``\\n`` or ``\\x1b``; printable text of any script stays."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
