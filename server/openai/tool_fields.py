"""The fields of a chat request about tools and reasoning, and their shapes.

``inputs.ChatRequest`` inherits them; ``docs/tools.md`` and ``docs/reasoning.md`` describe their
effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from server.openai.custom_tools import CustomDefinition
from server.openai.functions import AnyFunction, Function
from server.openai.unsupported import ignored_tool_params
from server.text.answer_format import AnswerFormat
from server.text.custom_input import to_arguments

_MAX_TOOLS = 1024
_KINDS = ("function", "custom")

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools must or may be called, and which."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None  # None: all
    is_named: bool = False  # exactly one call, of the named tool


def _read_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict):
        if value.get("type") in _KINDS and (name := _tool_name(value)) is not None:
            return ToolChoice("required", (name,), is_named=True)
        allowed = value.get("allowed_tools", value)  # Responses sends it without the inner object
        if value.get("type") == "allowed_tools" and isinstance(allowed, dict):
            return _read_allowed(allowed)
    raise ValueError("must be 'none', 'auto', 'required', or name a tool or allowed tools")


def _read_function_call(value: Any) -> ToolChoice | None:
    if value is None or value in ("none", "auto"):
        return None if value is None else ToolChoice(value)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("must be 'none', 'auto' or name a function")
    return ToolChoice("required", (name,), is_named=True)


def _read_allowed(allowed: Mapping[str, Any]) -> ToolChoice:
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise ValueError("must allow tools with mode 'auto' or 'required'")
    names = [_tool_name(tool) for tool in tools] if isinstance(tools, list) else []
    if not names or None in names:
        raise ValueError("must list the tools that are allowed")
    return ToolChoice(mode, tuple(name for name in names if name is not None))


def _tool_name(tool: Any) -> str | None:
    """The name in ``{"type": "function", "function": {"name": ...}}``, or without the inner one."""
    if not isinstance(tool, dict):
        return None
    kind = tool.get("type")
    inner = tool.get(kind if kind in _KINDS else "function", tool)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _check_names(tools: list[Tool]) -> list[Tool]:
    _check_functions([tool.callable for tool in tools])
    return tools


def _check_functions(functions: list[Function]) -> list[Function]:
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            raise ValueError(f"must not hold two tools named {name!r}")
    return functions


_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_CHOICE = {
    "anyOf": [
        {"type": "null"},
        {"enum": ["none", "auto", "required"]},
        *(
            {
                "type": "object",
                "required": ["type", kind],
                "properties": {"type": {"const": kind}, kind: _NAMED},
            }
            for kind in _KINDS
        ),
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "minItems": 1, "items": {"type": "object"}},
                    },
                },
            },
        },
    ]
}


_FUNCTION_CALL = {"anyOf": [{"type": "null"}, {"enum": ["none", "auto"]}, _NAMED]}


class _ToolModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


# What pydantic's own schema does not say: the rest is in the field that ``type`` names.
_BY_TYPE: dict[str, Any] = {
    "oneOf": [
        {"properties": {"type": {"const": "function"}}, "required": ["function"]},
        {"properties": {"type": {"const": "custom"}}, "required": ["type", "custom"]},
    ]
}


class _ToolOrCall(_ToolModel):
    """Something whose ``type`` names the field that has the rest."""

    model_config = ConfigDict(json_schema_extra=_BY_TYPE)

    type: Any

    @model_validator(mode="after")
    def _has_its_kind(self) -> Self:
        if getattr(self, self.type) is None:
            raise ValueError(f"{self.type}: is required")
        return self


class Tool(_ToolOrCall):
    """A tool that the model may call."""

    type: Literal["function", "custom"]
    function: AnyFunction | None = None
    custom: CustomDefinition | None = None

    @property
    def callable(self) -> Function:
        """The tool, or the function that stands for it."""
        if self.type == "custom":
            assert self.custom is not None
            return self.custom.to_function()
        assert self.function is not None
        return self.function


class EarlierFunction(_ToolModel):
    """The function of an earlier call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class EarlierCustom(_ToolModel):
    """The custom tool of an earlier call."""

    name: str
    input: str


class EarlierCall(_ToolOrCall):
    """An earlier call, as sent in the history."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: EarlierFunction | None = None
    custom: EarlierCustom | None = None

    @property
    def called(self) -> EarlierFunction:
        """The function that was called, or the one that stands for the custom tool."""
        if self.type == "custom":
            assert self.custom is not None
            return EarlierFunction(name=self.custom.name, arguments=to_arguments(self.custom.input))
        assert self.function is not None
        return self.function

    def for_template(self, answer_format: AnswerFormat) -> dict[str, Any]:
        """The call as the chat template of a model with this answer format expects it."""
        function = self.called
        arguments = answer_format.template_arguments(function.arguments)
        call: dict[str, Any] = {"type": "function"}
        call["function"] = {"name": function.name, "arguments": arguments}
        return call if self.id is None else {"id": answer_format.template_call_id(self.id), **call}


Tools = Annotated[list[Tool], Field(max_length=_MAX_TOOLS), AfterValidator(_check_names)]


class ToolFields(BaseModel):
    """A mixin: strictness and parsing are those of the shape it is mixed into."""

    tools: Tools | None = None
    tool_choice: Annotated[
        ToolChoice | None, PlainValidator(_read_choice), WithJsonSchema(_CHOICE)
    ] = None
    parallel_tool_calls: bool | None = None
    # The deprecated predecessor of ``tools``.
    functions: (
        Annotated[list[AnyFunction], Field(max_length=_MAX_TOOLS), AfterValidator(_check_functions)]
        | None
    ) = None
    function_call: Annotated[
        ToolChoice | None, PlainValidator(_read_function_call), WithJsonSchema(_FUNCTION_CALL)
    ] = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.functions and self.tools:
            raise ValueError("functions: excludes 'tools'")
        field = "function_call" if self.functions else "tool_choice"
        choice, known = self.choice, [function.name for function in self.available_functions]
        if choice.names is None and choice.mode != "required":
            return self
        if not known:
            raise ValueError(f"{field}: needs 'tools' to choose from")
        for name in choice.names or ():
            if name not in known:
                raise ValueError(f"{field}: names {name[:64]!r}, which is not in 'tools'")
        return self

    def ignored_tool_fields(self) -> list[str]:
        """Names of fields in the tools that request something but have no effect."""
        names: list[str] = []
        for index, tool in enumerate(self.tools or ()):
            names += ignored_tool_params(tool.model_extra, f"tools.{index}.")
            if tool.custom is not None and tool.type == "custom":
                names += tool.custom.ignored(f"tools.{index}.custom.")
            elif tool.function is not None:
                names += ignored_tool_params(
                    tool.function.ignored_fields, f"tools.{index}.function."
                )
        for index, function in enumerate(self.functions or ()):
            names += ignored_tool_params(function.ignored_fields, f"functions.{index}.")
        return names

    @property
    def available_functions(self) -> list[Function]:
        """The request's functions, and those that stand for its custom tools."""
        return self.functions or [tool.callable for tool in self.tools or []]

    @property
    def choice(self) -> ToolChoice:
        """Which of them may or must be called."""
        return (self.function_call if self.functions else self.tool_choice) or ToolChoice()
