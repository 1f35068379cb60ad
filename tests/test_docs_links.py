"""Links between documentation pages lead to existing files and headings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[[^\]\[]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_NAMED = re.compile(r'<a id="([\w-]+)"></a>')
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings, and those it keeps for older ones."""
    text = _FENCE.sub("", page.read_text())
    names = set(_NAMED.findall(text))
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        name, count = slug, 0
        while name in names:
            count += 1
            name = f"{slug}-{count}"
        names.add(name)
    return names


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere; external links are not followed."""
    wrong = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def test_links_lead_somewhere() -> None:
    wrong = {str(page.relative_to(ROOT)): links for page in pages() if (links := broken(page))}
    assert not wrong


def test_a_link_to_nowhere_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, twice\n## A title, twice\n[a](#a-title-twice) [b](#a-title-twice-1)\n"
        '<a id="old-title"></a>\n[g](#old-title) [h](#older-title)\n'
        "[c](page.md) [d](#a-title) [e](other.md)\n```\n[f](not-a-link.md)\n# not a heading\n```\n"
    )
    assert broken(page) == ["#older-title", "#a-title", "other.md"]
