"""An encoder as data, without its weights. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.rope_spec import RopeSpec

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu"]
# After attention and MLP; before them, but none before the first attention, and one at the end;
# or both before and after, and one at the end.
NormPlacement = Literal["post", "pre", "sandwich"]
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
    num_kv_heads: int | None = None  # of keys and values, for groups of heads; None: one each
    head_size: int | None = None  # None: an equal part of hidden_size
    # Of layers that are not local: KV heads and their width; None: as in local ones.
    global_heads: tuple[int, int] | None = None
    qk_norm: bool = False  # of each query and key
    value_norm: bool = False  # of each value, without a weight
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    embedding_scale: float = 1.0
    embedding_norm: bool = True
    placement: NormPlacement = "post"
    rms_offset: float | None = None  # of the stored weights of RMS norms; None: layer norms
    norm_eps: float = 1e-12
    norm_bias: bool = True
    attention_bias: bool = True
    activation: EncoderActivation = "gelu"
    gated: bool = False  # the activation of one projection is a factor of another (Shazeer 2020)
    gate_last: bool = False  # in the order of both projections' outputs
    up_bias: bool = True  # of the MLP's first projection, or of both
    down_bias: bool = True
    per_layer_size: int = 0  # of each layer's own projection of the embeddings; 0: none
    layer_scales: bool = False  # a factor of each layer's output
    projected_size: int = 0  # of a projection of the last hidden states; 0: there is none
    usual_context_len: int | None = None  # tokens that it was trained for; None: all positions
    num_labels: int = 0  # of the classification head; 0: none
    head: HeadSpec = HeadSpec()
    score_sigmoid: bool = True  # a score is the sigmoid of the head's output
    checkpoint_dtype: str | None = None  # from config.json

    @property
    def head_dim(self) -> int:
        """Width of one attention head, in layers that may be local."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def output_size(self) -> int:
        """Width of the hidden states that are pooled."""
        return self.projected_size or self.hidden_size

    def kv_heads(self, i: int) -> tuple[int, int]:
        """Return the number of layer ``i``'s heads of keys and values, and the width of all."""
        if self.global_heads is not None and i not in self.local_layers:
            return self.global_heads
        return self.num_kv_heads or self.num_heads, self.head_dim

    def qkv_sizes(self, i: int) -> tuple[int, int, int]:
        """Return the widths of all queries, keys and values of a token in layer ``i``."""
        num_kv_heads, head_dim = self.kv_heads(i)
        return self.num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Empty: an encoder generates nothing."""
        return ()

    @property
    def default_context_len(self) -> int:
        """The default length limit of a text, in tokens."""
        return min(self.max_context_len, self.usual_context_len or self.max_context_len)

    @property
    def max_context_len(self) -> int:
        """The longest supported text, in tokens."""
        return self.max_position_embeddings - self.position_offset
