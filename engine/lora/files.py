"""The files of an adapter in PEFT format."""

from __future__ import annotations

import contextlib
from pathlib import Path

from engine.file_digest import file_digest

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def adapter_digest(directory: str | Path) -> str:
    """By which an adapter's files are recognised; "" if they cannot be read."""
    with contextlib.suppress(OSError):
        return "-".join(file_digest(Path(directory) / name) for name in (CONFIG, WEIGHTS))
    return ""
