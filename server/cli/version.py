"""``quire version``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print the version of the installed package, or of the source tree it runs from."""
    del argv
    try:
        version = importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    print(f"quire {version}")
    return 0
