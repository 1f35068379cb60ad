"""Whether a response includes reasoning, by the request's options and the end of its prompt."""

from __future__ import annotations

from typing import Any, Literal

from server.openai.inputs import ChatRequest
from server.openai.tool_fields import ReasoningEffort
from server.state import Model

THINKING_KWARGS = ("enable_thinking", "thinking")  # names of templates' variables for it
_TAIL_TOKENS = 64  # longer than any reasoning mark

# The output starts inside reasoning; may start with reasoning; has no reasoning.
Thinking = Literal["open", "free", "over"]


def thinking_kwargs(effort: ReasoningEffort | None) -> dict[str, Any]:
    """The template variables for an amount of reasoning."""
    if effort is None:
        return {}
    kwargs: dict[str, Any] = {"reasoning_effort": effort}
    if effort != "minimal":
        kwargs |= dict.fromkeys(THINKING_KWARGS, effort != "none")
    return kwargs


def thinking_of(model: Model, body: ChatRequest, prompt: list[int]) -> Thinking:
    """The state of reasoning at the end of ``prompt``."""
    marks = model.answer_format.reasoning
    if marks is None:
        return "over"
    if body.continues_answer:
        return "open" if marks.is_open(body.messages[-1].text or "") else "over"
    tail = model.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.removesuffix(marks.title.rstrip()).endswith(marks.begin):
        return "open"
    return "over" if tail.endswith(marks.end) else "free"


def may_think(model: Model, body: ChatRequest, thinking: Thinking) -> bool:
    """Whether a grammar allows reasoning before the constrained text.

    A model whose template can only request reasoning reasons on request; a model whose template
    shows the reasoning marks reasons by itself.
    """
    if thinking != "free":
        return thinking == "open"
    asked = {**thinking_kwargs(body.reasoning_effort), **(body.chat_template_kwargs or {})}
    wants = [bool(asked[name]) for name in THINKING_KWARGS if name in asked]
    return any(wants) if wants else model.answer_format.reasons_by_default
