"""Types for pooling, which turns a prompt into one vector. See also ``engine/types.py``."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

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
    use_score_head: bool = (
        False  # return the classification head's raw output instead of an embedding
    )
    second_start: int | None = None  # for a pair of texts in one prompt: where the second begins

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidParameter("'dimensions' must be at least 1", param="dimensions")

    @property
    def needs_all_positions(self) -> bool:
        """Whether the result depends on tokens whose blocks may be found in the prefix cache."""
        return self.kind != "last" and not self.use_score_head


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's hidden states are pooled, and the size of the result."""

    kind: PoolingKind  # what the model was trained for, or the server's setting
    size: int  # dimensions of an embedding
    normalize: bool = True  # unless a request says otherwise
    num_labels: int = 0  # outputs of the classification head; 0: there is none
    sigmoid: bool = True  # whether scores are the sigmoid of the head's output


def relevance(logit: float, pooling: PoolingInfo) -> float:
    """The head's output as a score: 0 to 1, unless the model was trained for raw scores."""
    if not pooling.sigmoid:
        return logit
    # Two forms, so that neither overflows.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit))
