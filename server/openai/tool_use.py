"""One request's tools: those shown to the model, and those it may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from engine.types import Grammar
from server.errors import bad_field
from server.grammars import GrammarValidator
from server.openai.functions import Function
from server.openai.tool_fields import ToolFields
from server.text.answer_format import AnswerFormat
from server.text.dialects import Dialect
from server.text.tool_grammar import CallableTool


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request that may be called."""

    dialect: Dialect
    shown: tuple[Function, ...]  # to the model
    callable: tuple[Function, ...]  # the subset that may be called
    is_required: bool  # at least one call, and nothing else
    is_parallel: bool  # more than one call allowed

    field: str  # the request's field that has the tools

    @classmethod
    def of(cls, body: ToolFields, answer_format: AnswerFormat) -> Self | None:
        """The tools of ``body``; None if it has none, or does not want them called.

        Raises:
            ApiError: 400, the served model cannot call tools.
        """
        functions, choice = body.available_functions, body.choice
        if not functions or choice.mode == "none":
            return None
        field = "functions" if body.functions else "tools"
        if not answer_format.supports_tools:
            raise bad_field(field, "cannot be used: the model's chat template does not support it")
        if answer_format.dialect is None:
            problem = "cannot be used: how this model writes calls is not known here; the server "
            raise bad_field(field, problem + "can be set with --tool-call-parser")
        names = choice.names
        return cls(
            field=field,
            dialect=answer_format.dialect,
            shown=tuple(functions),
            callable=tuple(f for f in functions if names is None or f.name in names),
            is_required=choice.mode == "required",
            is_parallel=body.parallel_tool_calls is not False
            and not choice.is_named
            and not body.functions,
        )

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the arguments of the callable functions, by name."""
        return {function.name: function.parameters for function in self.callable}

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the callable custom tools."""
        return frozenset(tool.name for tool in self.callable if tool.custom is not None)

    async def check_patterns(self, grammars: GrammarValidator) -> None:
        """Raise ApiError (400) that names the custom tool whose format cannot be enforced."""
        for index, tool in enumerate(self.shown):
            if tool.pattern is not None:
                place = f"{self.field}.{index}.custom.format"
                await grammars.check(Grammar("regex", tool.pattern), param=place)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [function.for_template() for function in self.shown]

    @property
    def holds_schemas(self) -> bool:
        """Whether the arguments of a call are held to the function's schema."""
        return any(self._is_held(function) for function in self.callable)

    def to_grammar_tools(self) -> list[CallableTool]:
        """The tools as a grammar needs them; a forced call's arguments satisfy its schema too."""
        return [
            CallableTool(function.name, function.parameters, self._is_held(function))
            for function in self.callable
        ]

    def _is_held(self, function: Function) -> bool:
        return self.is_required or function.strict
