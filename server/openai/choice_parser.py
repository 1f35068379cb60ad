"""Parsing of one choice's output into parts, with a count of its reasoning tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.output import TextDelta
from engine.text.tokenizer import Tokenizer
from server.openai.choice import Choice
from server.text.custom_input import CustomInputs
from server.text.dialects import Dialect
from server.text.parser import AnswerParser
from server.text.parts import Part, Reasoning, Text
from server.text.reasoning import ReasoningMarks


class ChoiceParser:
    """Reads the deltas of one choice, and sets its finish reason and reasoning tokens."""

    def __init__(
        self,
        choice: Choice,
        tokenizer: Tokenizer,
        *,
        reasoning: ReasoningMarks | None,
        is_thinking: bool,
        dialect: Dialect | None,
        schemas: Mapping[str, Mapping[str, Any]],
        custom_tools: Collection[str],
        hidden: Collection[str],
        shown_special_ids: frozenset[int],
        buffer_calls: bool,
        include_reasoning: bool,
        is_forced: bool,
    ) -> None:
        """Begin; see ``AnswerParser`` for the other arguments.

        Args:
            choice: written to.
            tokenizer: the model's.
            custom_tools: names of the tools whose calls have an input instead of arguments.
            shown_special_ids: ids of the special tokens that markers are, or consist of.
            include_reasoning: include reasoning in the output.
        """
        self._choice = choice
        self._parser = AnswerParser(
            reasoning=reasoning,
            is_thinking=is_thinking,
            dialect=dialect,
            schemas=schemas,
            hidden=hidden,
            buffer_calls=buffer_calls,
            is_forced=is_forced,
        )
        self._custom_inputs = CustomInputs(custom_tools) if custom_tools else None
        self._include_reasoning = include_reasoning
        self._counter: _ReasoningCounter | None = None
        if reasoning is not None:
            text = IncrementalDetokenizer(tokenizer, shown_special_ids=shown_special_ids)
            self._counter = _ReasoningCounter(reasoning, is_thinking, text)

    @property
    def is_plain(self) -> bool:
        """Whether all further text is plain content that needs no parsing."""
        return self._parser.is_plain and self._counter is None

    def parse(self, delta: TextDelta) -> list[Part]:
        """The parts that are complete with ``delta``."""
        if self.is_plain:
            return [Text(delta.text)] if delta.text else []
        choice = self._choice
        parts = self._parser.push(delta.text)
        if self._counter is not None:
            choice.num_reasoning_tokens = self._counter.push(delta.token_ids)
            if self._counter.is_final:
                self._counter = None
        if delta.finished:
            # The client's own limits (length, stop strings) may cut off a call anywhere.
            cut = delta.finish_reason == "length" or delta.stop_reason is not None
            parts += self._parser.finish(truncated=cut)
            if self._parser.ends_in_calls and choice.finish_reason == "stop":
                choice.finish_reason = "tool_calls"
        if self._custom_inputs is not None:
            parts = self._custom_inputs.read(parts, is_last=delta.finished)
        if self._include_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]


class _ReasoningCounter:
    """Counts the tokens up to and including the one that completes the end-of-reasoning mark."""

    def __init__(
        self, marks: ReasoningMarks, is_thinking: bool, text: IncrementalDetokenizer
    ) -> None:
        self._parser = AnswerParser(reasoning=marks, is_thinking=is_thinking)
        self._text = text
        self._count = 0
        self.is_final = False  # the count is final

    def push(self, token_ids: Collection[int]) -> int:
        """Count ``token_ids`` and return the reasoning tokens so far."""
        parser = self._parser
        for token_id in token_ids:
            if self.is_final:
                break
            parser.push(self._text.push((token_id,)))
            self._count += 1
            self.is_final = parser.reasoning_ended
        return self._count if parser.has_reasoned else 0
