"""Logging of the server's processes to standard error, as text or as JSON.

A library leaves logging to its user, so only the programs (the command line, the engine process)
call :func:`configure`. In both formats control characters are escaped, so that a logged value
cannot forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

from engine.config import EngineConfig, LogFormat, LogLevel

# Identifies one of several similar processes, by kind: {"engine": 1, "rank": 0}.
ProcessLabels = Mapping[str, int]
_NO_LABELS: ProcessLabels = {}


def configure(level: LogLevel, form: LogFormat, labels: ProcessLabels = _NO_LABELS) -> None:
    """Send all logging to standard error, replacing any earlier configuration.

    Args:
        level: the lowest level that is logged.
        form: the format of the lines.
        labels: included in each line if several processes of a kind log to the same place.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(labels) if form == "json" else TextFormatter(labels))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Our own lines cover what these log at "info", and better: requests, to us and to the Hub.
    for library in ("uvicorn", "httpx", "httpx2"):
        logging.getLogger(library).setLevel("DEBUG" if level == "debug" else "WARNING")
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk behind stderr must not end a request


def configure_engine(config: EngineConfig, rank: int = 0) -> None:
    """Call ``configure`` for a process that computes a model or a part of one."""
    writer: dict[str, int] = {}
    if config.num_replicas > 1:
        writer["engine"] = config.replica
    if config.num_ranks > 1:
        writer["rank"] = rank
    configure(config.log_level, config.log_format, writer)


class TextFormatter(logging.Formatter):
    """``12:00:00 WARNING server.app: message``, with the traceback indented below.

    With several writers: ``12:00:00 WARNING [engine 1, rank 0] engine.core: message``.
    """

    def __init__(self, labels: ProcessLabels = _NO_LABELS) -> None:
        super().__init__()
        self._prefix = f"[{_format_labels(labels)}] " if labels else ""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record; only a traceback takes more than one line."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        whose = f"{self._prefix}{record.name}"
        line = f"{clock} {record.levelname} {whose}: {_escape(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line += "".join(f"\n    {_escape(row)}" for row in trace)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``.

    The entries of ``extra={"fields": {...}}`` and of the writer become keys of their own.
    """

    def __init__(self, labels: ProcessLabels = _NO_LABELS) -> None:
        super().__init__()
        self._labels = labels

    def format(self, record: logging.LogRecord) -> str:
        """Format one record on one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._labels,
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _format_labels(writer: ProcessLabels) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in writer.items())


def _escape(text: str) -> str:
    """Escape control characters as ``\\n`` or ``\\x1b``; printable text of any script is kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
