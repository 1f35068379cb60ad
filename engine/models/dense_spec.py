"""A dense layer behind a model's pooling, as data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DenseActivation = Literal["identity", "tanh", "relu", "gelu"]


@dataclass(frozen=True)
class DenseSpec:
    """A module ``Dense`` of sentence-transformers: ``activation(weight @ vector + bias)``."""

    directory: Path  # of its config and its weights
    inputs: int
    outputs: int
    bias: bool
    activation: DenseActivation

    @property
    def architecture(self) -> str:
        """The kind of model, for messages."""
        return "Dense"
