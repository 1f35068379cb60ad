"""The reasoning marks of model families, as data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from server.text import harmony


@dataclass(frozen=True)
class ReasoningMarks:
    """The delimiters of reasoning."""

    name: str
    begin: str
    end: str
    title: str = ""  # may follow the first mark, and is not reasoning
    channels: harmony.Channels | None = None  # the whole answer is messages with headers
    shown_by: tuple[str, ...] = ()  # texts in templates that show them; empty: the end

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are neither reasoning nor content."""
        return (self.begin, self.end) if self.channels is None else self.channels.markers

    def appear_in(self, template: str) -> bool:
        """Whether a chat template's source contains them."""
        return all(text in template for text in self.shown_by or (self.end,))

    def is_open(self, text: str) -> bool:
        """Whether ``text`` ends inside reasoning."""
        return text.rfind(self.begin) > text.rfind(self.end)


MARKS = (
    ReasoningMarks(
        *("harmony", harmony.REASONING, harmony.END),
        channels=harmony.HARMONY,
        shown_by=(harmony.REASONING,),
    ),
    ReasoningMarks(
        *("muse", harmony.MUSE.reasoning, harmony.EOM),
        channels=harmony.MUSE,
        shown_by=("to=self", harmony.EOM),
    ),
    ReasoningMarks("think", "<think>", "</think>"),
    ReasoningMarks("mistral", "[THINK]", "[/THINK]"),
    ReasoningMarks("seed", "<seed:think>", "</seed:think>"),
    ReasoningMarks("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("gemma4", "<|channel>", "<channel|>", title="thought\n"),
    ReasoningMarks("exaone", "<thought>", "</thought>"),
    ReasoningMarks("longcat", "<longcat_think>", "</longcat_think>"),
    ReasoningMarks("granite", "Here is my thought process:", "Here is my response:"),
)
BY_NAME = {marks.name: marks for marks in MARKS}


def detect_marks(template: str, added_tokens: Collection[str]) -> ReasoningMarks | None:
    """The reasoning marks that a chat template's source shows; None if they are unknown.

    A template that only has a switch for reasoning shows them through the vocabulary: both marks
    are tokens.
    """
    for marks in MARKS:
        if marks.appear_in(template):
            return marks
    if "enable_thinking" in template:
        for marks in MARKS:
            if marks.begin in added_tokens and marks.end in added_tokens:
                return marks
    return None
