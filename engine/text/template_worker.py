"""Renders chat templates in a confined process (``engine/sandbox``): standard library and jinja2.

A template is code that comes with a model; here it runs in jinja2's immutable sandbox. The first
frame is ``{"templates": {name: source}}``. Each further one, ``{"template": name, "context":
{...}}``, is answered by ``{"text": ...}`` or ``{"error": ...}``. Without a context the template is
only compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

_MAX_ERROR_CHARS = 500


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers a frame."""
    renderer = _Renderer(first["templates"])

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "context" not in request:
                return {"text": renderer.check(request["template"])}
            return {"text": renderer.render(request["template"], request["context"])}
        except MemoryError:
            raise
        except Exception as error:
            return {"error": renderer.explain(error)}

    return answer


def exhausted() -> dict[str, Any]:
    """The answer when a template has used too much memory."""
    return {"error": "the chat template used too much memory"}


def syntax_error(source: str) -> str | None:
    """The syntax error of a template with its line, or None."""
    from jinja2 import TemplateSyntaxError

    try:
        _Renderer({"": source}).check("")
    except TemplateSyntaxError as error:
        return _describe_error(error)
    return None


class _Renderer:
    """Compiled templates in an environment like that of transformers."""

    def __init__(self, sources: dict[str, str]) -> None:
        import jinja2
        import jinja2.debug  # imported by jinja2 when a template fails, when no file can be opened
        import jinja2.exceptions
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox

        class Refused(jinja2.TemplateError):
            """Raised by a template's raise_exception."""

        class Generation(jinja2.ext.Extension):
            """{% generation %} marks the model's part for training; here its body is just shown."""

            tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.Scope(body, lineno=line)

        class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
            """jinja2's sandbox, in which access to a forbidden attribute fails at once."""

            def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
                kind = type(obj).__name__
                raise jinja2.exceptions.SecurityError(
                    f"access to attribute '{attribute}' of a '{kind}' object is unsafe"
                )

        def raise_exception(message: str) -> NoReturn:
            raise Refused(message)

        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._environment = environment
        self._sources = sources
        self._compiled: dict[str, Any] = {}
        self._refused = Refused
        self._syntax_error = jinja2.TemplateSyntaxError
        # Use the parts that jinja2, json and the clock load lazily.
        environment.from_string("{{ [strftime_now('%Y')] | tojson }}").render()
        self.explain(ValueError())

    def render(self, name: str, context: dict[str, Any]) -> str:
        self.check(name)
        return self._compiled[name].render(**context)

    def check(self, name: str) -> str:
        """Compile a template, unless it has been. Raises jinja2.TemplateSyntaxError."""
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
        return ""

    def explain(self, error: Exception) -> str:
        """One line for the client: the template's own message, or its error."""
        is_syntax = isinstance(error, self._syntax_error)
        words = _describe_error(error) if is_syntax else str(error) or type(error).__name__
        if not isinstance(error, self._refused):
            words = f"the chat template failed: {words}"
        return words[:_MAX_ERROR_CHARS]


def _describe_error(error: Any) -> str:
    """A syntax error's message and line."""
    return f"{error.message} (line {error.lineno})"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
