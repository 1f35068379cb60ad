"""Renders the chat template as a server would: jinja2's immutable sandbox and three helpers."""

import json
from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def render(
    messages: list[dict],
    tools: list[dict] | None = None,
    add_generation_prompt: bool = False,
    **variables: object,
) -> str:
    """The prompt text of a chat. Raises jinja2.TemplateError for an unsupported role or part."""
    return _template().render(
        messages=messages,
        tools=tools or None,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


@cache
def _template():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False)
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))


def _raise(message: str) -> None:
    raise TemplateError(message)
