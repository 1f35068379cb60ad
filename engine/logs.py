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

from engine.config import LogFormat, LogLevel


def configure(level: LogLevel, form: LogFormat) -> None:
    """Send all logging to standard error; replaces what was configured before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn tells at "info" what our own lines tell better.
    logging.getLogger("uvicorn").setLevel("DEBUG" if level == "debug" else "WARNING")
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk behind stderr must not end a request


class TextFormatter(logging.Formatter):
    """``12:00:00 WARNING server.app: message``, with the traceback indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """One record; only its traceback takes further lines."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname} {record.name}: {_escape(record.getMessage())}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            line += "".join(f"\n    {_escape(row)}" for row in trace)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``.

    What is passed as ``extra={"fields": {...}}`` becomes keys of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One record on one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _escape(text: str) -> str:
    """Control characters as ``\\n`` or ``\\x1b``; printable text of any script stays."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
