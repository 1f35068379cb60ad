"""An encoder as data, without its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder with learned positions and post-norm layers."""

    architecture: str  # Hugging Face model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    max_position_embeddings: int  # rows of the table, including unused ones
    position_offset: int = 0  # the row of a text's first position
    num_token_types: int = 0  # for pairs of texts; 0: there is no table
    relative_buckets: int = 0  # relative position buckets (MPNet); 0: none
    norm_eps: float = 1e-12
    activation: EncoderActivation = "gelu"
    num_labels: int = 0  # of the classification head; 0: none
    head_activation: Literal["tanh", "relu"] = "tanh"  # inside that head
    score_sigmoid: bool = True  # a score is the sigmoid of the head's output
    checkpoint_dtype: str | None = None  # from config.json

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Empty: an encoder generates nothing."""
        return ()

    @property
    def default_context_len(self) -> int:
        """The default length limit of a text, in tokens."""
        return self.max_context_len

    @property
    def max_context_len(self) -> int:
        """The longest supported text, in tokens."""
        return self.max_position_embeddings - self.position_offset
