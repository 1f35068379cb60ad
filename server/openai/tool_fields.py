"""The fields of a chat request about tools and reasoning, and their shapes.

``inputs.ChatRequest`` inherits them; ``docs/tools.md`` and ``docs/reasoning.md`` describe their
effects.
"""

from __future__ import annotations

import re
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

from server.openai.tool_schema import schema_problem
from server.openai.unsupported import ignored_tool_params
from server.text.answer_format import AnswerFormat

_MAX_TOOLS = 1024
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
_NAME = re.compile(FUNCTION_NAME)
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # as models know it
_NO_ARGUMENTS: dict[str, Any] = {**_NO_PARAMETERS, "additionalProperties": False}

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    strict: bool
    definition: dict[str, Any]  # without what is not for the model, in the client's order
    ignored_fields: dict[str, Any]  # fields without effect

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates expect it."""
        return {"type": "function", "function": self.definition}


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether tools must or may be called, and which."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None  # None: all
    is_named: bool = False  # exactly one call, of the named function


def _read_function(value: Any) -> Function:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    name, parameters = value.get("name"), value.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("must have a name of 1 to 128 letters, digits, '_', '-' and '.'")
    if not isinstance(value.get("description", ""), str | None):
        raise ValueError("must have a description that is a string")
    if not isinstance(value.get("strict", False), bool | None):
        raise ValueError("must have a 'strict' that is true or false")
    if parameters is None:
        parameters = _NO_ARGUMENTS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError("must have parameters that are the JSON schema of an object")
    if problem := schema_problem(parameters):
        raise ValueError(f"must have parameters that are a JSON schema; {problem}")
    about = ("name", "description", "parameters")
    shown = {key: value[key] for key in value if key in about and value[key] is not None}
    shown["parameters"] = _NO_PARAMETERS if parameters is _NO_ARGUMENTS else parameters
    unused = {key: value[key] for key in value if key not in (*about, "strict")}
    return Function(name, parameters, bool(value.get("strict")), shown, unused)


def _read_choice(value: Any) -> ToolChoice | None:
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if isinstance(value, dict):
        if value.get("type") == "function" and (name := _function_name(value)) is not None:
            return ToolChoice("required", (name,), is_named=True)
        allowed = value.get("allowed_tools", value)  # Responses sends it without the inner object
        if value.get("type") == "allowed_tools" and isinstance(allowed, dict):
            return _read_allowed(allowed)
    raise ValueError("must be 'none', 'auto', 'required', or name a function or allowed tools")


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
    names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
    if not names or None in names:
        raise ValueError("must list the functions that are allowed")
    return ToolChoice(mode, tuple(name for name in names if name is not None))


def _function_name(tool: Any) -> str | None:
    """The name in ``{"type": "function", "function": {"name": ...}}``, or without the inner one."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _check_names(tools: list[Tool]) -> list[Tool]:
    _check_functions([tool.function for tool in tools])
    return tools


def _check_functions(functions: list[Function]) -> list[Function]:
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            raise ValueError(f"must not hold two functions named {name!r}")
    return functions


_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": FUNCTION_NAME},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
_CHOICE = {
    "anyOf": [
        {"type": "null"},
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": _NAMED},
        },
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

AnyFunction = Annotated[Function, PlainValidator(_read_function), WithJsonSchema(_FUNCTION)]


class _ToolModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Tool(_ToolModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: AnyFunction


class EarlierFunction(_ToolModel):
    """The function of an earlier call."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class EarlierCall(_ToolModel):
    """An earlier call, as sent in the history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: EarlierFunction

    def for_template(self, answer_format: AnswerFormat) -> dict[str, Any]:
        """The call as the chat template of a model with this answer format expects it."""
        function = self.function
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
            names += ignored_tool_params(tool.function.ignored_fields, f"tools.{index}.function.")
        for index, function in enumerate(self.functions or ()):
            names += ignored_tool_params(function.ignored_fields, f"functions.{index}.")
        return names

    @property
    def available_functions(self) -> list[Function]:
        """The request's functions."""
        return self.functions or [tool.function for tool in self.tools or []]

    @property
    def choice(self) -> ToolChoice:
        """Which of them may or must be called."""
        return (self.function_call if self.functions else self.tool_choice) or ToolChoice()
