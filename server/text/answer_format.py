"""The format of a model's answers: its dialect of tool calls and its reasoning marks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from engine.text.tokenizer import Tokenizer
from server.text import dialects, reasoning
from server.text.dialects import Dialect
from server.text.reasoning import ReasoningMarks

# Detected from the chat template, disabled, or by name; the names are those of the two tables.
ToolCallParser = Literal[
    "auto",
    "none",
    "harmony",
    "mistral_args",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "glm45",
    "longcat_pairs",
    "longcat",
    "minimax_m2",
    "seed_oss",
    "cohere",
    "nemotron",
    "hunyuan_a13b",
    "qwen3_xml",
    "hermes",
    "granite",
    "gemma4",
    "functiongemma",
    "lfm2",
    "olmo3",
    "pythonic",
    "llama3",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "harmony",
    "muse",
    "think",
    "mistral",
    "seed",
    "cohere",
    "gemma4",
    "exaone",
    "longcat",
    "granite",
]

# Llama's templates refuse a history with two calls in one message, with this error.
_ONE_CALL = "only supports single tool-calls"


class MismatchedParsers(ValueError):
    """Two parsers that cannot read the same answers."""


def check_parsers(tool_call_parser: ToolCallParser, reasoning_parser: ReasoningParser) -> None:
    """Raise MismatchedParsers (one line) if one's calls are in nothing that the other reads."""
    if tool_call_parser == "harmony" and reasoning_parser not in ("auto", "harmony"):
        raise MismatchedParsers(
            "--tool-call-parser harmony needs --reasoning-parser harmony (or auto), not "
            f"{reasoning_parser}: its calls are in the channels that only that one reads"
        )
    if reasoning_parser == "harmony" and tool_call_parser not in ("auto", "none", "harmony"):
        raise MismatchedParsers(
            "--reasoning-parser harmony needs --tool-call-parser harmony (or auto, or none), not "
            f"{tool_call_parser}: in its channels there are no other calls"
        )
    if reasoning_parser == "muse" and tool_call_parser not in ("auto", "none"):
        raise MismatchedParsers(
            "--reasoning-parser muse needs --tool-call-parser none (or auto), not "
            f"{tool_call_parser}: no calls are read in its messages"
        )


@dataclass(frozen=True)
class AnswerFormat:
    """What can be parsed in a model's answers."""

    dialect: Dialect | None  # None: no tool calls
    reasoning: ReasoningMarks | None  # None: no reasoning
    reasons_by_default: bool  # the chat template shows the marks, not just a switch
    supports_tools: bool  # the chat template shows tools to the model
    expects_text_arguments: bool  # it expects the arguments of earlier calls as JSON text
    special_ids: dict[str, int]  # of those marks and their parts that are special tokens

    @classmethod
    def of(
        cls,
        template: str | None,
        tokenizer: Tokenizer,
        *,
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
    ) -> Self:
        """The format of a model with this chat template.

        ``harmony``, where it is chosen for one of the two parsers, is the default of the other.

        Args:
            template: the source for requests with tools; None without a template.
            tokenizer: the model's.
            tool_call_parser: the format of tool calls.
            reasoning_parser: the reasoning marks.
        """
        source = template or ""
        # Calls in channels are only found by what reads the channels, so each selects the other.
        if tool_call_parser == "harmony" and reasoning_parser == "auto":
            reasoning_parser = "harmony"
        if reasoning_parser == "harmony" and tool_call_parser == "auto":
            tool_call_parser = "harmony"
        if tool_call_parser == "auto":
            dialect = dialects.detect_dialect(source)
            if dialect is not None and dialect.name == "harmony" and reasoning_parser != "auto":
                dialect = None  # nothing reads the channels, so requests with tools are refused
        else:
            dialect = dialects.BY_NAME.get(tool_call_parser)
        if dialect is not None and _ONE_CALL in source:
            dialect = replace(dialect, is_single=True)
        if reasoning_parser == "auto":
            marks = reasoning.detect_marks(source, tokenizer.added_tokens)
        else:
            marks = reasoning.BY_NAME.get(reasoning_parser)
        if marks is not None and marks.channels is not None and dialect is not None:
            # In channels nothing reads other calls, so requests with tools are refused.
            dialect = dialect if (dialect.name, marks.name) == ("harmony", "harmony") else None
        written = () if dialect is None else (*dialect.markers, dialect.token)
        thought = () if marks is None else marks.markers
        ids = {text: tokenizer.special_id(text) for text in (*written, *thought)}
        return cls(
            dialect,
            marks,
            marks is not None and marks.appear_in(source),
            dialects.supports_tools(source),
            _concatenates_arguments(source),
            {text: id_ for text, id_ in ids.items() if id_ is not None},
        )

    def template_call_id(self, id: str) -> str:
        """An earlier call's id as the chat template expects it: Mistral's need nine characters."""
        dialect = self.dialect
        return id if dialect is None or dialect.id_prefix else id[-dialect.id_length :]

    def template_arguments(self, arguments: str | dict[str, Any]) -> str | dict[str, Any]:
        """An earlier call's arguments as the chat template expects them, usually as an object.

        Malformed arguments are passed unchanged.
        """
        if self.expects_text_arguments:
            return arguments if isinstance(arguments, str) else json.dumps(arguments)
        if isinstance(arguments, dict):
            return arguments
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments


def _concatenates_arguments(template: str) -> bool:
    """Whether a template concatenates a call's arguments as a string."""
    joined = re.search(r"""arguments(?:['"]\])?\s*\+""", template)
    converted = re.search(r"""arguments(?:['"]\])?\s*\|\s*(?:tojson|items)""", template)
    return joined is not None and converted is None
