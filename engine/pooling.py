"""Types for pooling, which turns a prompt into one vector. See also ``engine/types.py``."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from engine.argument_types import settle_fields
from engine.errors import InvalidParameter

# Which hidden states make up the vector: the last token's, the mean of all, the first token's, or
# the maximum over all tokens in each dimension.
PoolingKind = Literal["last", "mean", "cls", "max"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one prompt's hidden states are pooled. A request with these samples no tokens.

    Checks that depend on the model (``dimensions`` within its size, whether it has a classification
    head) are made where the model is known.
    """

    kind: PoolingKind = "last"
    dimensions: int | None = None  # keep only the first ones; None: all
    normalize: bool = True  # scale to length 1, after truncation
    # Return the classification head's raw output instead of an embedding.
    use_score_head: bool = False
    second_start: int | None = None  # for a pair of texts in one prompt: where the second begins
    # Instead of a head's output: the logit of the first of these tokens, less that of the second.
    score_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        settle_fields(self)
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidParameter("'dimensions' must be at least 1", param="dimensions")

    @property
    def needs_all_positions(self) -> bool:
        """Whether the result depends on tokens whose blocks may be found in the prefix cache."""
        return self.kind != "last" and not self.use_score_head


class MessageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model reads texts as messages of its chat template."""

    add_generation_prompt: bool = False  # the beginning of an answer stands at the end
    content_parts: bool = False  # a content is a list of parts
    template: str | None = None  # the name of the chat template; None: the one of chats


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's hidden states are pooled, and the size of the result."""

    kind: PoolingKind  # what the model was trained for, or the server's setting
    size: int  # dimensions of an embedding
    normalize: bool = True  # unless a request says otherwise
    num_labels: int = 0  # outputs of the classification head; 0: there is none
    sigmoid: bool = True  # whether scores are the sigmoid of the head's output
    prompts: dict[str, str] = {}  # by name: what the model was trained to see before a text
    default_prompt: str | None = None  # the name of the one that stands before every text
    pools_prompts: bool = True  # whether the states of a prompt's tokens belong to the vector
    lowercase: bool = False  # texts are read in lower case, whatever the tokenizer does
    messages: MessageFormat | None = None  # None: texts are read as they are
    score_tokens: tuple[int, ...] = ()  # see ``PoolingParams``; empty: a head scores

    def prompt_of(self, name: str | None) -> str:
        """Return the text of the prompt that a request asks for.

        Args:
            name: of a prompt; None: the default one; empty: none.

        Raises:
            InvalidParameter: the model has no such prompt, or it cannot be used.
        """
        chosen = self.default_prompt if name is None else name
        if not chosen:
            return ""
        if chosen not in self.prompts:
            known = ", ".join(map(repr, self.prompts))
            has = f"its prompts are {known}" if known else "it has no prompts"
            raise InvalidParameter(
                f"the model has no prompt {chosen[:80]!r}: {has}", param="prompt_name"
            )
        if not self.pools_prompts:
            raise InvalidParameter(
                "this model leaves prompts out of its pooling, which is not supported",
                param="prompt_name",
            )
        return self.prompts[chosen]

    def instruction_of(self, instruction: str | None) -> str:
        """Return what stands before a pair of texts: ``instruction``, or the default prompt.

        Raises:
            InvalidParameter: the model takes none, or its default prompt cannot be used.
        """
        if instruction is None:
            return self.prompt_of(None)
        if self.messages is None or not self.num_labels:
            raise InvalidParameter(
                "'instruction' is for models that read a query and a document as messages",
                param="instruction",
            )
        return instruction

    def score_params(self, second_start: int | None = None) -> PoolingParams:
        """Return what a pair of texts is scored with; see ``num_labels``."""
        return PoolingParams(
            kind=self.kind,
            use_score_head=True,
            second_start=second_start,
            score_tokens=self.score_tokens,
        )

    def as_read(self, text: str, prompt: str = "") -> str:
        """Return what is encoded of a text behind ``prompt``."""
        whole = prompt + text
        return whole.lower() if self.lowercase else whole


def relevance(logit: float, pooling: PoolingInfo) -> float:
    """The head's output as a score: 0 to 1, unless the model was trained for raw scores."""
    if not pooling.sigmoid:
        return logit
    # Two forms, so that neither overflows.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit))
