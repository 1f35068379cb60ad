"""What an encoder is, apart from its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder with learned positions and norms behind what they norm (post-norm)."""

    architecture: str  # Hugging Face model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    max_position_embeddings: int  # rows of the table, those that no text uses included
    first_position: int = 0  # where the positions of a text begin in that table
    num_token_types: int = 0  # kinds of tokens, for pairs of texts; 0: there is no such table
    relative_buckets: int = 0  # distances that attention tells apart besides (MPNet); 0: none
    norm_eps: float = 1e-12
    activation: EncoderActivation = "gelu"
    num_labels: int = 0  # of the classification head; 0: there is none
    head_activation: Literal["tanh", "relu"] = "tanh"  # within that head
    score_sigmoid: bool = True  # a score is the sigmoid of what the head says
    checkpoint_dtype: str | None = None  # as config.json tells it

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a text that it writes: it writes none."""
        return ()

    @property
    def default_context(self) -> int:
        """Longest text that is served without being asked for, in tokens."""
        return self.longest_context

    @property
    def longest_context(self) -> int:
        """Longest text, in tokens."""
        return self.max_position_embeddings - self.first_position
