"""Custom tools: those that the model calls with a text of its own instead of JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from server.openai.functions import FUNCTION_NAME, Function
from server.openai.unsupported import ignored_tool_params
from server.text.custom_input import Syntax, input_pattern, input_schema

_MAX_DEFINITION = 65_536  # characters

Definition = Annotated[str, Field(min_length=1, max_length=_MAX_DEFINITION)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class InputGrammar(_Shape):
    """A grammar of the input."""

    syntax: Syntax
    definition: Definition

    @property
    def pattern(self) -> str | None:
        """A regular expression for what it allows; None if none is known, and nothing is held."""
        return input_pattern(self.syntax, self.definition)

    def describe(self, about: str | None) -> str:
        """The description of a tool with this grammar, as the model is told."""
        told = f"The input must match this {self.syntax} grammar:\n{self.definition}"
        return told if not about else f"{about}\n\n{told}"


class InputFormat(_Shape):
    """What the input looks like."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self) -> Self:
        if self.type == "grammar" and self.grammar is None:
            raise ValueError("grammar: is required")
        if self.type != "grammar" and self.grammar is not None:
            raise ValueError("grammar: comes with the type 'grammar', and with no other")
        return self


class CustomDefinition(_Shape):
    """A custom tool, as chat requests define it."""

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    format: InputFormat | None = None

    def to_function(self) -> Function:
        """The function that stands for it: its only argument is the input."""
        grammar = None if self.format is None else self.format.grammar
        about = self.description if grammar is None else grammar.describe(self.description)
        pattern = None if grammar is None else grammar.pattern
        shown: dict[str, Any] = {"name": self.name}
        if about:
            shown["description"] = about
        return Function(
            name=self.name,
            parameters=input_schema(pattern),
            strict=True,  # the input is always found
            definition={**shown, "parameters": input_schema()},
            ignored_fields={},
            custom=self.model_dump(include=_FIELDS, exclude_none=True),
            pattern=pattern,
        )

    def ignored(self, where: str) -> list[str]:
        """Paths below ``where`` of what requests something and has no effect."""
        names = ignored_tool_params(self.model_extra, where)
        if (form := self.format) is not None:
            names += ignored_tool_params(form.model_extra, f"{where}format.")
            if form.grammar is not None:
                names += ignored_tool_params(form.grammar.model_extra, f"{where}format.grammar.")
                names += [f"{where}format"] if form.grammar.pattern is None else []
        return names


_FIELDS = set(CustomDefinition.model_fields)
