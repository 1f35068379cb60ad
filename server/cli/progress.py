"""What ``quire serve`` tells a person while the model loads and once it is ready."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TextIO

from engine.types import EngineInfo

_BAR_WIDTH = 30
_QUESTION = "What is the capital of France?"


class LoadDisplay:
    """Progress of loading: a bar redrawn in place at a terminal, a few lines elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._started_s = time.monotonic()
        self._told: tuple[str, int] | None = None  # what and which quarter the last line told
        self._drawn = False

    def __call__(self, fraction: float, what: str) -> None:
        """Tell that ``fraction`` (0 to 1) of the loading is done, now ``what``."""
        fraction = min(max(fraction, 0.0), 1.0)
        if self._terminal:
            full = round(fraction * _BAR_WIDTH)
            bar = "█" * full + "·" * (_BAR_WIDTH - full)
            elapsed_s = time.monotonic() - self._started_s
            self._write(f"\r\x1b[K{fraction:4.0%} {bar} {elapsed_s:4.1f} s  {what}")
            self._drawn = True
            return
        told = (what, int(fraction * 4))
        if told != self._told:
            self._told = told
            self._write(f"loading {fraction:4.0%}  {what}\n")

    def clear(self) -> None:
        """Take the bar away, so that the next line starts at the left."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def line(self, text: str) -> None:
        """Write a whole line."""
        self.clear()
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads, or the disk is full: serve all the same
            self._stream.write(text)
            self._stream.flush()


def ready_message(info: EngineInfo, *, url: str, model: str, needs_key: bool, took_s: float) -> str:
    """The memory plan, the address, and a command to paste."""
    key = "  -H 'Authorization: Bearer YOUR_KEY' \\\n" if needs_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}'
    return (
        f"{info.memory.describe()}\n"
        f"Quire serves {model} at {url} ({info.num_parameters / 1e6:,.0f} M parameters, "
        f"{info.dtype}, {info.device}; ready after {took_s:.1f} s). Try:\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"{key}"
        f"  -d '{body}'\n"
    )


def display_url(host: str, port: int) -> str:
    """An address that a person on this machine can use for a server bound to ``host``."""
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
