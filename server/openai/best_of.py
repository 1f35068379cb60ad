"""Complete choices, and the selection of the best among them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.output import TextDelta, TokenLogprob
from server.openai.choice import Choice


class ChoiceOutput:
    """The whole output of one choice."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self._texts: list[str] = []

    def add(self, delta: TextDelta) -> None:
        """Append the next delta."""
        self._texts.append(delta.text)
        self.logprobs += delta.logprobs
        self.token_ids += delta.token_ids

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, including the one that ended it."""
        logprobs = [entry.logprob for entry in self.logprobs if entry.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0


def select_choices(
    outputs: Sequence[ChoiceOutput], n: int, *, by_likelihood: bool = False
) -> list[ChoiceOutput]:
    """The ``n`` choices of each prompt to return; there may be more.

    These are the first ``n``, or with ``by_likelihood`` those of the highest mean log-probability,
    the likeliest first.
    """
    by_prompt: dict[int, list[ChoiceOutput]] = {}
    for whole in outputs:
        by_prompt.setdefault(whole.choice.prompt_index, []).append(whole)
    chosen: list[ChoiceOutput] = []
    for group in by_prompt.values():
        if by_likelihood:
            group.sort(key=lambda whole: whole.mean_logprob, reverse=True)
        chosen += group[:n]
    return chosen
