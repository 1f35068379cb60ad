"""The page: one self-contained HTML document that may load nothing else.

It is kept as three files that editors understand, and assembled once. The content security policy
names script and style by their hashes, so injected code cannot run.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_HERE = Path(__file__).parent


class Page:
    """The document and its headers."""

    def __init__(self) -> None:
        style = (_HERE / "page.css").read_text(encoding="utf-8")
        script = (_HERE / "page.js").read_text(encoding="utf-8")
        html = (_HERE / "page.html").read_text(encoding="utf-8")
        html = html.replace("/* page.css */", style).replace("/* page.js */", script)
        self.body = html.encode()
        self.headers = {
            "content-security-policy": "; ".join(
                (
                    "default-src 'none'",
                    f"script-src {_hash(script)}",
                    f"style-src {_hash(style)}",
                    "img-src data:",
                    "connect-src 'self'",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                )
            ),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
