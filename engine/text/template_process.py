"""Renders chat templates in a process that can be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import TemplateError
from engine.sandbox.process import SandboxedProcess

_HANDLER = Path(__file__).with_name("template_worker.py")


class TemplateUnanswered(TemplateError):
    """The process gave no answer, so nothing is known about the template."""


class RenderProcess:
    """Renders templates in one confined process. Calls from several threads are serialised."""

    def __init__(self, templates: dict[str, str], *, limit_s: float) -> None:
        """Render ``templates`` (sources by name), each call within ``limit_s`` seconds."""
        self._limit_s = limit_s
        self._process = SandboxedProcess(
            _HANDLER, ("jinja2", "markupsafe"), {"templates": templates}, limit_s=limit_s
        )

    def start(self) -> None:
        """Start the process now instead of with the first call; does not wait for it."""
        self._process.start()

    def close(self) -> None:
        """End the process. A later call starts a new one."""
        self._process.close()

    def render(self, name: str, context: dict[str, Any]) -> str:
        """Render template ``name`` with ``context``.

        Raises:
            TemplateError: it raised an error, or was killed for its use of time or memory; the
                latter is TemplateUnanswered.
            UnicodeEncodeError: ``context`` contains a lone surrogate.
        """
        return self._call({"template": name, "context": context})

    def check(self, name: str) -> None:
        """Compile template ``name``. Raises TemplateError if that fails."""
        self._call({"template": name})

    def _call(self, request: dict[str, Any]) -> str:
        try:
            reply = self._process.call(request)
        except TimeoutError:
            limit = f"{self._limit_s:g} s"
            raise TemplateUnanswered(f"the chat template did not finish within {limit}") from None
        except OSError:
            raise TemplateUnanswered("the chat template's process ended") from None
        if "text" not in reply:
            raise TemplateError(reply["error"])
        return reply["text"]
