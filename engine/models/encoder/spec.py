"""An encoder as data, without its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.rope_spec import RopeSpec

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]
HeadActivation = EncoderActivation | Literal["tanh"]


@dataclass(frozen=True)
class HeadSpec:
    """A classification head: pooling, a dense layer, an activation, and a layer for the labels."""

    pooling: Literal["cls", "mean"] = "cls"  # which hidden states it reads
    activation: HeadActivation = "tanh"
    bias: bool = True  # of the dense layer
    has_norm: bool = False  # after the activation


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder. The defaults are BERT's: learned positions, post-norm layers, biases."""

    architecture: str  # Hugging Face model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    max_position_embeddings: int  # rows of the table, including unused ones
    position_offset: int = 0  # the row of a text's first position
    rope: RopeSpec | None = None  # if set, there is no table of positions
    local_rope: RopeSpec | None = None  # of local layers
    local_layers: frozenset[int] = frozenset()  # numbers of the layers with a window
    window: int = 0  # the distance up to which a token attends in local layers, to either side
    num_token_types: int = 0  # for pairs of texts; 0: there is no table
    relative_buckets: int = 0  # relative position buckets (MPNet); 0: none
    # Norms before attention and MLP, but none before the first attention, and one at the end.
    pre_norm: bool = False
    norm_eps: float = 1e-12
    norm_bias: bool = True
    attention_bias: bool = True
    activation: EncoderActivation = "gelu"
    gated: bool = False  # the activation of one projection is a factor of another (Shazeer 2020)
    gate_last: bool = False  # in the order of both projections' outputs
    up_bias: bool = True  # of the MLP's first projection, or of both
    down_bias: bool = True
    num_labels: int = 0  # of the classification head; 0: none
    head: HeadSpec = HeadSpec()
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
