"""The nouns of pooling: a prompt becomes one vector instead of a text. See ``engine/types.py``."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from engine.errors import InvalidParameter

# Which hidden states a vector is made of: the last token's, the mean of all, the first token's,
# or the greatest value that any token has in each dimension.
PoolingKind = Literal["last", "mean", "cls", "max"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is made of one prompt's hidden states. A request that has these samples nothing.

    What needs the model to be judged (``dimensions`` within its size, whether it has a head that
    scores) is checked where the model is known.
    """

    kind: PoolingKind = "last"
    dimensions: int | None = None  # keep so many, from the first; None: all
    normalize: bool = True  # to length 1, after the cut
    scores: bool = False  # what the classification head says, as it says it, and no embedding
    second_from: int | None = None  # of two texts put together: where the second begins

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidParameter("'dimensions' must be at least 1", param="dimensions")

    @property
    def needs_all_positions(self) -> bool:
        """Whether the result depends on tokens whose blocks may be found in the prefix cache."""
        return self.kind != "last" and not self.scores


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's hidden states are to be pooled, and what comes of it."""

    kind: PoolingKind  # what the model was made for, or the server told
    size: int  # numbers in an embedding
    normalize: bool = True  # unless a request says otherwise
    num_labels: int = 0  # numbers that the classification head says; 0: there is none
    sigmoid: bool = True  # a score is the sigmoid of what the head says, or that itself


def relevance(logit: float, pooling: PoolingInfo) -> float:
    """What the head says, as a score: 0 to 1 unless the model was made to tell it as it is."""
    if not pooling.sigmoid:
        return logit
    # Two forms, neither of which overflows.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit))
