"""Structured output: the fields that request it, and the grammar that results.

response_format        OpenAI's: text, json_object, json_schema
structured_outputs     vLLM's: one of json, json_object, regex, choice, grammar
guided_json, guided_regex, guided_choice, guided_grammar    vLLM's older names
regex, ebnf            SGLang's
grammar                llama.cpp's
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.types import Grammar
from server.errors import bad_field
from server.openai.gbnf import to_lark
from server.openai.unsupported import ignored_params

FORMAT_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

Schema = dict[str, Any] | bool
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class JsonSchemaFormat(_StrictModel):
    """The schema of a response, as OpenAI wraps it."""

    name: Annotated[str, Field(pattern=FORMAT_NAME)]
    description: str | None = None
    definition: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_StrictModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    # llama.cpp's place for the schema of a json_object.
    definition: Annotated[Schema | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: is required, with a 'name' and the 'schema' in it")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("json_schema: comes with type 'json_schema', and with no other")
        if self.definition is not None and self.type != "json_object":
            raise ValueError("schema: comes with type 'json_object', and with no other")
        return self

    def grammar(self) -> Grammar | None:
        """The grammar of this format, if any."""
        if self.type == "text":
            return None
        schema = self.definition if self.json_schema is None else self.json_schema.definition
        return Grammar("json_object") if schema is None else _schema_grammar(schema)


class StructuredOutputs(_StrictModel):
    """vLLM's ``structured_outputs``: exactly one of its fields."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        fields = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(field is not None for field in fields) != 1:
            known = "'json', 'json_object', 'regex', 'choice' and 'grammar'"
            raise ValueError(f"must hold exactly one of {known}")
        return self

    def to_grammar(self) -> Grammar:
        """The grammar of the field that is set."""
        if self.json_ is not None:
            return _schema_grammar(self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return _choice_grammar(self.choice)
        return Grammar("json_object") if self.grammar is None else _lark_grammar(self.grammar)


class StructuredFields(BaseModel):
    """A mixin with a generation request's fields for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    def ignored_options(self) -> list[str]:
        """Names of what these fields contain that has no effect."""
        names: list[str] = []
        if self.response_format is not None:
            names += ignored_params(self.response_format.model_extra, "response_format.")
            wrapped = self.response_format.json_schema
            if wrapped is not None:
                names += ignored_params(wrapped.model_extra, "response_format.json_schema.")
        if self.structured_outputs is not None:
            names += ignored_params(self.structured_outputs.model_extra, "structured_outputs.")
        return names


class RequestedGrammar(NamedTuple):
    """The grammar that constrains a request's output."""

    grammar: Grammar
    param: str  # the field that requested it


def requested_grammar(body: StructuredFields) -> RequestedGrammar | None:
    """The grammar that a request asks for, if any.

    Two fields may request the same grammar: clients that support servers of several generations
    send both.

    Raises:
        ApiError: 400, two fields request different grammars, or a grammar cannot be translated.
    """
    asked: dict[str, Grammar | None] = {
        "response_format": body.response_format and body.response_format.grammar(),
        "structured_outputs": body.structured_outputs and body.structured_outputs.to_grammar(),
        "guided_json": None if body.guided_json is None else _schema_grammar(body.guided_json),
    }
    for field in ("guided_regex", "regex"):
        text = getattr(body, field)
        asked[field] = None if text is None else Grammar("regex", text)
    choices = body.guided_choice
    asked["guided_choice"] = None if choices is None else _choice_grammar(choices)
    for field in ("guided_grammar", "ebnf", "grammar"):
        text = getattr(body, field)
        asked[field] = None if text is None else _lark_grammar(text, field)
    found = [
        RequestedGrammar(grammar, field) for field, grammar in asked.items() if grammar is not None
    ]
    for held in found[1:]:
        if held.grammar != found[0].grammar:
            raise bad_field(held.param, f"cannot be combined with '{found[0].param}'")
    return found[0] if found else None


def _schema_grammar(schema: Schema | str) -> Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar("json_schema", text)


def _choice_grammar(choices: list[str]) -> Grammar:
    return Grammar("choice", json.dumps(choices, ensure_ascii=False))


def _lark_grammar(text: str, param: str = "structured_outputs") -> Grammar:
    """Parse a grammar in Lark's notation, or in llama.cpp's GBNF, recognised by ``::=``."""
    return Grammar("lark", to_lark(text, param) if _GBNF_RULE.search(text) else text)
