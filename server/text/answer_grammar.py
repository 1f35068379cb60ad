"""The grammar of a whole answer: reasoning first, then content or tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.types import Grammar
from server.text import harmony
from server.text.dialects import Dialect
from server.text.lark import ANY_TEXT, LarkBuilder, regex
from server.text.reasoning import ReasoningMarks
from server.text.tool_grammar import CallableTool, calls_only, text_or_calls


@dataclass(frozen=True, kw_only=True)
class AnswerRules:
    """The constraints on an answer."""

    content: Grammar | None = None  # of the content; None: any text
    dialect: Dialect | None = None  # the format of tool calls
    tools: Sequence[CallableTool] = ()
    is_required: bool = False  # tool calls and no content
    is_parallel: bool = True  # more than one call allowed
    reasoning: ReasoningMarks | None = None  # may come first; None: no reasoning
    is_thinking: bool = False  # the answer begins inside reasoning
    channels: harmony.Channels | None = None  # messages with headers
    special_ids: Mapping[str, int]  # of the marks that are special tokens

    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None if any text is allowed.

        Raises:
            UnenforceableSchema: a tool's schema cannot be enforced on its arguments.
        """
        holds_calls = self.is_required or not self.is_parallel
        holds_calls = holds_calls or any(tool.is_strict for tool in self.tools)
        if self.content is None and not (self.tools and holds_calls):
            return None
        if not self.tools and self.reasoning is None and self.channels is None:
            return self.content
        lark = LarkBuilder(self.special_ids)
        if self.channels is not None:
            thoughts = self._channel_reasoning_rule(lark, self.channels)
            message = self._channel_message_rule(lark, self.channels)
            return Grammar("lark", lark.build(f"{thoughts} {message}"))
        return Grammar(
            "lark", lark.build(f"{self._reasoning_rule(lark)} {self._content_rule(lark)}")
        )

    def _reasoning_rule(self, lark: LarkBuilder) -> str:
        if self.reasoning is None:
            return ""
        blank = lark.rule(r"/\s{0,4}/", terminal=True)
        thought = f"{lark.until(self.reasoning.end)} {blank}"
        if self.is_thinking:
            return thought
        return f"({blank} {lark.literal(self.reasoning.begin)} {thought})?"

    def _channel_reasoning_rule(self, lark: LarkBuilder, channels: harmony.Channels) -> str:
        """Reasoning messages."""
        if self.reasoning is None:
            return ""
        begin, following = lark.literal(channels.reasoning), lark.literal(harmony.NEXT_MESSAGE)
        return f"({begin} {lark.until(channels.end)} {following})*"

    def _channel_message_rule(self, lark: LarkBuilder, channels: harmony.Channels) -> str:
        """The last message: content or a tool call."""
        calls = ""
        if self.tools and self.dialect is not None:
            calls = calls_only(lark, self.dialect, self.tools, is_parallel=False)
            if self.is_required:
                return calls
        if self.content is None:
            content = lark.rule(ANY_TEXT, terminal=True)
        else:
            content = _embed(lark, self.content)
        said = f"{lark.literal(channels.content)} {content}"
        return f"({said} | {calls})" if calls else said

    def _content_rule(self, lark: LarkBuilder) -> str:
        if not self.tools or self.dialect is None:
            assert self.content is not None
            return _embed(lark, self.content)
        if self.is_required:
            return calls_only(lark, self.dialect, self.tools, is_parallel=self.is_parallel)
        if self.content is not None:
            calls = calls_only(lark, self.dialect, self.tools, is_parallel=self.is_parallel)
            return f"({_embed(lark, self.content)} | {calls})"
        return text_or_calls(lark, self.dialect, self.tools, is_parallel=self.is_parallel)


def _embed(lark: LarkBuilder, grammar: Grammar) -> str:
    """Embed a grammar of any kind in another."""
    match grammar.kind:
        case "json_object":
            return lark.schema({"type": "object"})
        case "json_schema":
            schema = json.loads(grammar.text)
            return lark.schema(schema if isinstance(schema, dict) else {})
        case "regex":
            return lark.rule(regex(grammar.text), terminal=True)
        case "choice":
            choices = json.loads(grammar.text)
            return lark.rule(" | ".join(lark.literal(choice) for choice in choices))
        case "lark":
            return lark.rule("%lark {\n" + grammar.text.strip() + "\n}")
