"""Generates the settings table of ``docs/cli.md``: ``python -m server.cli.reference docs/cli.md``.

Rewrites the text between the two markers of the page; a test checks that the page is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from server.settings import Setting, settings_table

BEGIN = "<!-- settings: made by python -m server.cli.reference docs/cli.md -->"
END = "<!-- end of settings -->"


def settings_reference() -> str:
    """The table of all settings as Markdown, with a section for each group."""
    sections: dict[str, list[str]] = {}
    for row in settings_table():
        sections.setdefault(row.group, []).append(
            f"| `{row.flag}` | {_default(row)} | {_meaning(row)} |"
        )
    head = "| Flag | Default | Meaning |\n|---|---|---|\n"
    tables = (f"### {group}\n\n{head}" + "\n".join(rows) for group, rows in sections.items())
    return "\n\n".join(tables)


def update(page: str) -> str:
    """``page`` with the table between its markers regenerated."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{settings_reference()}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the table of the page named on the command line."""
    (path,) = map(Path, sys.argv[1:] if argv is None else argv)
    path.write_text(update(path.read_text("utf-8")), "utf-8")
    return 0


def _default(row: Setting) -> str:
    if row.default in (None, []):
        return ""  # the help says what happens then
    if row.kind == "flag":
        return "on" if row.default else "off"
    return f"`{row.default}`"


def _meaning(row: Setting) -> str:
    choices = ", ".join(f"`{choice}`" for choice in row.choices)
    return row.help + (f" One of {choices}." if choices else "")


if __name__ == "__main__":
    sys.exit(main())
