"""The tools of a request: functions, custom tools, and namespaces of both.

A tool of a namespace is shown to the model under a name that begins with the namespace's.
``OfferedTool`` translates in both directions.

Agents also list tools that OpenAI's servers run, such as a web search. Beside tools of the client's
own these are left out and reported; a request that has no others is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
from pydantic import Field, model_validator

from server.errors import bad_field, shorten
from server.openai.api_model import ApiModel
from server.openai.custom_tools import Definition
from server.openai.functions import FUNCTION_NAME
from server.openai.responses import outputs
from server.openai.unsupported import ignored_tool_params
from server.text.custom_input import Syntax, input_pattern

# Kinds of tools that OpenAI's servers run, or that its own models are trained to use.
_HOSTED = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    }
)

Name = Annotated[str, Field(pattern=FUNCTION_NAME)]


class ResponseTool(ApiModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # None: if its schema can be enforced


class InputFormat(ApiModel):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    syntax: Syntax | None = None
    definition: Definition | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self) -> Self:
        for field in ("syntax", "definition"):
            if self.type == "grammar" and getattr(self, field) is None:
                raise ValueError(f"{field}: is required for a grammar")
        return self

    @property
    def is_held(self) -> bool:
        """Whether inputs have this format; otherwise the model is only told of it."""
        if self.syntax is None or self.definition is None:
            return True
        return input_pattern(self.syntax, self.definition) is not None

    def for_chat(self) -> dict[str, Any]:
        """The format as a chat request has it."""
        if self.type == "text":
            return {"type": "text"}
        grammar = {"syntax": self.syntax, "definition": self.definition}
        return {"type": "grammar", "grammar": grammar}


class CustomTool(ApiModel):
    """A tool that the model may call with a text of its own."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class Namespace(ApiModel):
    """A group of tools with a name in common."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[Any], Field(min_length=1)]  # each read on its own, to name a bad one


class OfferedTool(NamedTuple):
    """A tool that the model may call."""

    definition: ResponseTool | CustomTool
    namespace: str | None
    where: str  # its path in the request

    @property
    def name(self) -> str:
        """The name under which the model knows the tool."""
        return shown_name(self.definition.name, self.namespace)

    @property
    def is_custom(self) -> bool:
        """Whether its calls have a text as input."""
        return isinstance(self.definition, CustomTool)

    @property
    def may_be_loose(self) -> bool:
        """Whether the request leaves it open whether calls satisfy the schema."""
        return isinstance(self.definition, ResponseTool) and self.definition.strict is None

    def is_strict(self, loose: Collection[str]) -> bool:
        """Whether calls satisfy the schema; ``loose`` are the names of tools with which not."""
        if self.may_be_loose:
            return self.name not in loose
        return not isinstance(self.definition, ResponseTool) or bool(self.definition.strict)

    def for_chat(self, loose: Collection[str]) -> dict[str, Any]:
        """The tool as a chat request has it."""
        tool = self.definition
        shown: dict[str, Any] = {"name": self.name, "description": tool.description}
        if isinstance(tool, CustomTool):
            shown["format"] = None if tool.format is None else tool.format.for_chat()
        else:
            shown |= {"parameters": tool.parameters, "strict": self.is_strict(loose)}
        given = {key: value for key, value in shown.items() if value is not None}
        return {"type": tool.type, tool.type: given}


class Group(NamedTuple):
    """A namespace and its tools."""

    definition: Namespace
    tools: tuple[OfferedTool, ...]
    where: str


class ToolSet(msgspec.Struct, frozen=True):
    """The tools of one request."""

    listed: tuple[OfferedTool | Group, ...] = ()
    left_out: tuple[str, ...] = ()  # paths of hosted tools

    @property
    def offered(self) -> list[OfferedTool]:
        """All tools that the model may call, those of namespaces one by one."""
        offered: list[OfferedTool] = []
        for each in self.listed:
            offered += each.tools if isinstance(each, Group) else (each,)
        return offered

    def find(self, name: str, namespace: str | None = None) -> str:
        """The name under which the model knows a tool; without its namespace if that is clear."""
        named = [tool for tool in self.offered if tool.definition.name == name]
        exact = [tool for tool in named if tool.namespace == namespace]
        found = exact or (named if namespace is None else [])
        return found[0].name if len(found) == 1 else shown_name(name, namespace)

    def ignored(self) -> list[str]:
        """Paths of what requests something and has no effect."""
        names = list(self.left_out)
        for each in self.listed:
            if isinstance(each, Group):
                names += ignored_tool_params(each.definition.model_extra, f"{each.where}.")
        for tool in self.offered:
            definition = tool.definition
            names += ignored_tool_params(definition.model_extra, f"{tool.where}.")
            form = definition.format if isinstance(definition, CustomTool) else None
            if form is not None:
                names += ignored_tool_params(form.model_extra, f"{tool.where}.format.")
                names += [] if form.is_held else [f"{tool.where}.format"]
        return names


def read_tools(value: Any) -> ToolSet:
    """Parse a request's tools one by one, so that the error names the invalid one.

    Raises ApiError (400), and ValueError if there is no list.
    """
    if value is None:
        return ToolSet()
    if not isinstance(value, list):
        raise ValueError("must be a list")
    listed: list[OfferedTool | Group] = []
    left_out: list[str] = []
    for index, tool in enumerate(value):
        where = f"tools.{index}"
        if not isinstance(tool, dict):
            raise bad_field(where, "must be an object")
        kind = str(tool.get("type"))
        if _is_hosted(kind):
            left_out.append(where)
        elif kind == "namespace":
            group = Namespace.read(tool, f"{where}.")
            inner = [
                _read_tool(each, f"{where}.tools.{number}", group.name)
                for number, each in enumerate(group.tools)
            ]
            listed.append(Group(group, tuple(inner), where))
        else:
            listed.append(_read_tool(tool, where))
    if left_out and not listed:
        raise _not_supported(left_out[0], str(value[0].get("type")))
    return ToolSet(tuple(listed), tuple(left_out))


def echo_tools(
    tools: ToolSet, loose: Collection[str]
) -> list[outputs.FunctionTool | outputs.CustomTool | outputs.NamespaceTool]:
    """The tools as a response repeats them, with defaults filled in."""
    echoed: list[outputs.FunctionTool | outputs.CustomTool | outputs.NamespaceTool] = []
    for each in tools.listed:
        if isinstance(each, Group):
            about = each.definition
            inner = [_echo(tool, loose) for tool in each.tools]
            echoed.append(outputs.NamespaceTool(about.name, about.description or "", inner))
        else:
            echoed.append(_echo(each, loose))
    return echoed


def shown_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool."""
    if not namespace:
        return name
    return f"{namespace.rstrip('_')}__{name}"


def _read_tool(tool: Any, where: str, namespace: str | None = None) -> OfferedTool:
    if not isinstance(tool, dict):
        raise bad_field(where, "must be an object")
    match tool.get("type"):
        case "function":
            return OfferedTool(ResponseTool.read(tool, f"{where}."), namespace, where)
        case "custom":
            return OfferedTool(CustomTool.read(tool, f"{where}."), namespace, where)
        case kind:
            raise _not_supported(where, str(kind))


def _not_supported(where: str, kind: str) -> Exception:
    return bad_field(
        f"{where}.type", f"{shorten(kind, 40)!r} is not supported; send functions and custom tools"
    )


def _is_hosted(kind: str) -> bool:
    """Whether OpenAI has such a tool; some kinds end with a date."""
    return kind in _HOSTED or kind.startswith("web_search_preview_")


def _echo(tool: OfferedTool, loose: Collection[str]) -> outputs.FunctionTool | outputs.CustomTool:
    definition = tool.definition
    if isinstance(definition, CustomTool):
        form = definition.format
        shape = None if form is None else form.model_dump(exclude_none=True)
        return outputs.CustomTool(definition.name, definition.description, shape)
    return outputs.FunctionTool(
        definition.name, definition.parameters, tool.is_strict(loose), definition.description
    )
