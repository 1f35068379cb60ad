"""Paths that requests name, within a directory that the operator has named."""

from __future__ import annotations

from pathlib import Path


def find_within(directory: Path, path: str) -> Path | None:
    """What lies at ``path`` in ``directory``, links followed; None: nothing does, or it lies
    elsewhere."""
    root = directory.resolve()
    try:
        found = (root / path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # too long, links in a circle, a NUL
        return None
    return found if found.is_relative_to(root) else None
