"""Chat templates rendered in a process that can be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.confined.process import ConfinedProcess
from engine.errors import TemplateError

_HANDLER = Path(__file__).with_name("template_worker.py")


class RenderProcess:
    """Renders templates in one confined process. Calls from several threads take turns."""

    def __init__(self, templates: dict[str, str], *, limit_s: float) -> None:
        """Render ``templates`` (sources by name), each call within ``limit_s`` seconds."""
        self._limit_s = limit_s
        self._process = ConfinedProcess(
            _HANDLER, ("jinja2", "markupsafe"), {"templates": templates}, limit_s=limit_s
        )

    def start(self) -> None:
        """Start the process now rather than with the first call; does not wait for it."""
        self._process.start()

    def close(self) -> None:
        """End the process. A later call starts another one."""
        self._process.close()

    def render(self, name: str, context: dict[str, Any]) -> str:
        """The text that template ``name`` makes of ``context``.

        Raises:
            TemplateError: it refused, failed, or was killed for its use of time or memory.
            UnicodeEncodeError: ``context`` holds a lone surrogate.
        """
        return self._ask({"template": name, "context": context})

    def check(self, name: str) -> None:
        """Compile template ``name``. Raises TemplateError where that fails."""
        self._ask({"template": name})

    def _ask(self, request: dict[str, Any]) -> str:
        try:
            reply = self._process.ask(request)
        except TimeoutError:
            limit = f"{self._limit_s:g} s"
            raise TemplateError(f"the chat template did not finish within {limit}") from None
        except OSError:
            raise TemplateError("the chat template's process ended") from None
        if "text" not in reply:
            raise TemplateError(reply["error"])
        return reply["text"]
