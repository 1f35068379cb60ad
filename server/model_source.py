"""From what a person calls a model to the directory or file that holds it."""

from __future__ import annotations

import os
import re

from engine.errors import ModelLoadError
from engine.gguf.file import is_gguf

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_model(name: str) -> str:
    """Where ``name`` lies: itself where there is such a thing, else fetched from the Hub.

    Args:
        name: a directory in Hugging Face format, a GGUF file, or ``org/name`` on the Hugging Face
            Hub.

    Raises:
        ModelLoadError: there is no such directory, or the Hub does not give it; one line.
    """
    if os.path.isdir(name) or is_gguf(name):
        return name
    if os.path.exists(name):
        raise ModelLoadError(
            f"{name} is not a GGUF file; other models are directories in Hugging Face format"
        )
    if not _HUB_NAME.fullmatch(name):
        raise ModelLoadError(f"there is no model directory {name}")
    from huggingface_hub import snapshot_download  # slow to import; only needed here

    try:
        return snapshot_download(name, allow_patterns=_WANTED_FILES)
    except Exception as error:  # its tree of errors spans several libraries and versions
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"there is no directory {name}, and the Hub did not give it: {reason[0][:200]}"
        ) from error
