"""Splits JSON Lines text into its lines."""

from __future__ import annotations

from collections.abc import Iterator


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1.

    Only line feeds end one. ``str.splitlines`` also breaks at characters that JSON strings may
    hold as they are, such as U+2028.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line
