"""Locations of files that ship with the package, and of the user's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from engine.errors import ModelLoadError


def default_model_dir() -> Path:
    """The directory of the embedded model.

    Raises:
        ModelLoadError: this installation has none.
    """
    spec = find_spec("demo")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(root) / "model"
        if (path / "config.json").is_file():
            return path
    raise ModelLoadError("this installation holds no embedded model; name a model directory")


def embedded_draft_dir() -> Path | None:
    """The directory of the embedded model's draft model, or None if this installation has none."""
    try:
        path = default_model_dir().parent / "draft"
    except ModelLoadError:
        return None
    return path if (path / "config.json").is_file() else None


def home_dir() -> Path:
    """The user's home; the root directory for a user who has none, as containers set HOME then."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")
