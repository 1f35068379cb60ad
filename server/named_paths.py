"""Resolution of paths named by requests within a directory named by the operator."""

from __future__ import annotations

from pathlib import Path


def find_within(directory: Path, path: str) -> Path | None:
    """Resolve ``path`` within ``directory``, following links; None if absent or outside it."""
    root = directory.resolve()
    try:
        found = (root / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # too long, a cycle of links, a NUL
        return None
    return found if found.is_relative_to(root) else None
