"""Terminal output of ``quire serve`` while the model loads and once it is ready."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TextIO

from engine.config import LogFormat
from engine.types import EngineInfo

logger = logging.getLogger(__name__)

_BAR_WIDTH = 30
_LINE_PERIOD_S = 2.0
_QUESTION = "What is the capital of France?"


class LoadDisplay:
    """Progress of loading: a bar redrawn in place on a terminal, otherwise an occasional line.

    Args:
        form: where logs are JSON, progress is records among them, on a terminal too.
        stream: where bars and lines are written; standard error by default.
        line_period_s: seconds from one line to the next; by default those of a load.
    """

    def __init__(
        self,
        form: LogFormat = "text",
        stream: TextIO | None = None,
        line_period_s: float | None = None,
    ) -> None:
        self._stream = stream or sys.stderr
        self._is_json = form == "json"
        self._has_bar = self._stream.isatty() and not self._is_json
        self._line_period_s = _LINE_PERIOD_S if line_period_s is None else line_period_s
        self._started_s = time.monotonic()
        # time.monotonic() before which no line is written: a quick load prints none, however long
        # it took to begin.
        self._next_line_s: float | None = None
        self._drawn = False

    def __call__(self, fraction: float, what: str) -> None:
        """Report that ``fraction`` (0 to 1) of the loading is done, with ``what`` in progress."""
        fraction = min(max(fraction, 0.0), 1.0)
        now_s = time.monotonic()
        if self._has_bar:
            full = round(fraction * _BAR_WIDTH)
            bar = "█" * full + "·" * (_BAR_WIDTH - full)
            elapsed_s = now_s - self._started_s
            # The cursor returns to the left, so that a log line of the engine replaces the bar.
            self._write(f"\r\x1b[K{fraction:4.0%} {bar} {elapsed_s:4.1f} s  {what}\r")
            self._drawn = True
            return
        if self._next_line_s is None:
            self._next_line_s = now_s + self._line_period_s
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + self._line_period_s
            if self._is_json:
                fields = {"fraction": round(fraction, 3)}
                logger.info("%s", what, extra={"fields": fields})
            else:
                self._write(f"{fraction:4.0%}  {what}\n")

    def clear(self) -> None:
        """Remove the bar, so that the next line starts at the left."""
        if self._drawn:
            self._write("\x1b[K")
            self._drawn = False

    def line(self, text: str) -> None:
        """Write a whole line."""
        self.clear()
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader is gone or the disk is full: keep serving
            self._stream.write(text)
            self._stream.flush()


def log_ready(
    info: EngineInfo, *, url: str, model: str, has_dashboard: bool, took_s: float
) -> None:
    """What :func:`ready_message` says, as a record of a JSON log."""
    fields = {
        "url": url,
        "model": model,
        "num_parameters": info.num_parameters,
        "dtype": info.dtype,
        "device": info.device,
        "took_s": round(took_s, 1),
    }
    if has_dashboard:
        fields["dashboard"] = f"{url}/dashboard"
    logger.info("serving", extra={"fields": fields})


def ready_message(
    info: EngineInfo,
    *,
    url: str,
    model: str,
    needs_key: bool,
    has_dashboard: bool,
    took_s: float,
) -> str:
    """The address, and a command to try."""
    key = "  -H 'Authorization: Bearer YOUR_KEY' \\\n" if needs_key else ""
    path, asked = "chat/completions", f'"messages": [{{"role": "user", "content": "{_QUESTION}"}}]'
    if not info.is_generative:
        path, asked = "embeddings", f'"input": "{_QUESTION}"'
    page = f"\nand watch it at {url}/dashboard\n" if has_dashboard else ""
    return (
        f"Quire serves {model} at {url} ({info.num_parameters / 1e6:,.0f} M parameters, "
        f"{info.dtype}, {info.device}; ready after {took_s:.1f} s). Try:\n\n"
        f"curl {url}/v1/{path} -H 'Content-Type: application/json' \\\n"
        f"{key}"
        f'  -d \'{{"model": "{model}", {asked}}}\'\n'
        f"{page}"
    )


def display_url(host: str, port: int, *, tls: bool = False) -> str:
    """A URL that works on this machine for a server bound to ``host``."""
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
