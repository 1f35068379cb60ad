"""What handlers that decode media files share: standard library only.

A file arrives in pieces, ``{"append": base64}``, each answered by ``{}``. What follows is the
handler's own. A file that cannot be read is answered by ``{"error": ...}``; ``{"reset": true}``
begins another one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

_MAX_ERROR_CHARS = 200
_NOT_LIBRARY = ("av.__main__", "av.datasets")

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def telling_errors(answer: Answer) -> Answer:
    """Return a function that answers as ``answer`` does, and by ``{"error": ...}`` if it raises."""

    def told(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return answer(request)
        except MemoryError:
            raise
        except Exception as error:  # libraries raise several kinds on malformed files
            texts = (getattr(error, name, "") for name in ("error_string", "strerror"))
            text = next(filter(None, texts), "") or str(error) or type(error).__name__
            return {"error": text[:_MAX_ERROR_CHARS]}

    return told


def exhausted() -> dict[str, Any]:
    """The answer when a file has used too much memory."""
    return {"error": "decoding used too much memory"}


def import_av() -> Any:
    """Import PyAV with all its modules: it imports some with the first stream of their kind, when
    files can no longer be opened."""
    av = importlib.import_module("av")
    for module in pkgutil.walk_packages(av.__path__, "av."):
        if module.name not in _NOT_LIBRARY:
            importlib.import_module(module.name)
    return av


def open_container(av: Any, data: BinaryIO, formats: Sequence[str], kind: str) -> Any:
    """Open a file from its beginning for its first stream of a kind.

    Args:
        av: PyAV.
        data: the file.
        formats: FFmpeg's names of the demuxers that may be used; others may want further files,
            which cannot be opened.
        kind: ``audio`` or ``video``.

    Raises:
        ValueError: it has no such stream.
    """
    data.seek(0)
    container = av.open(data, mode="r", options={"format_whitelist": ",".join(formats)})
    streams = getattr(container.streams, kind)
    if not streams:
        raise ValueError(f"it has no {kind}")
    # Each thread would reserve address space, which is limited here.
    streams[0].codec_context.thread_count = 1
    return container
