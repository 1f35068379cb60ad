"""A layer of a decoder as data: how those of one model differ. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Where a layer's norms are, x being the residual stream:
#   pre:      x += attention(norm(x));        x += mlp(norm(x))            Llama
#   post:     x += norm(attention(x));        x += norm(mlp(x))            OLMo 2
#   sandwich: x += norm(attention(norm(x)));  x += norm(mlp(norm(x)))      Gemma 2
#   parallel: x += attention(norm(x)) + mlp(norm(x))                       GPT-NeoX, Cohere
Placement = Literal["pre", "post", "sandwich", "parallel"]


@dataclass(frozen=True)
class HeadSpec:
    """A layer's attention heads that differ from the model's."""

    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False  # before norm and rope; no value projection
    num_heads: int | None = None  # of queries; None: the model's


@dataclass(frozen=True)
class LayerSpec:
    """The ways in which layers of one model differ."""

    window: int | None = None  # attention window in tokens, own included; None: all
    rope: bool = True  # False: no position embedding in this layer (NoPE)
    local_rope: bool = False  # uses the windowed layers' frequencies
    experts: bool = False  # a mixture of experts instead of an MLP
    chunk: int | None = None  # attention stays within chunks of this size; None: no chunks
    bidirectional_images: bool = False  # an image's tokens attend to all of it
    recurrent: bool = False  # the model's recurrence instead of attention
    hybrid: bool = False  # attention and the model's recurrence on the same norm, summed
    placement: Placement | None = None  # of its norms; None: the model's
    heads: HeadSpec | None = None  # of its own; None: the model's
    sinks: bool = True  # False: none, even if the model has them
    # The number of the layer whose keys and values it reads, instead of having its own.
    kv_sharing_layer: int | None = None
    # Its queries attend to the positions selected in the last layer before that has an indexer.
    shares_selection: bool = False
    intermediate_size: int | None = None  # of its MLP; None: the model's
    gate_limit: float | None = None  # clamps the SwiGLU of its MLP, or of its shared expert
    expert_gate_limit: float | None = None  # the same, of its experts
    activation_sparsity: float = 0.0  # share of its MLP's gates that is zeroed, as estimated
    mlp: bool = True  # False: it ends with its mixer
    # A mixture of experts reads what its MLP reads; the result is added after the next layer.
    experts_aside: bool = False
    mlp_output_norm: bool = False  # its MLP's output is normed, whatever the placement
    # The checkpoint's numbers of its mixer and its MLP, if they are separate layers there
    # (Nemotron-H), or of the layer and this half of it (LongCat-Flash); None: the layer's own.
    checkpoint_layers: tuple[int, int] | None = None

    @property
    def has_recurrence(self) -> bool:
        """Whether it has the model's recurrence."""
        return self.recurrent or self.hybrid
