"""A pipeline stage of a model, as data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageSpec:
    """The contiguous layers of one pipeline stage.

    The first stage has the embeddings and the head, the last one the final norm.
    """

    begin: int  # number of its first layer
    num_layers: int  # of the whole model
    is_first: bool
    is_last: bool
