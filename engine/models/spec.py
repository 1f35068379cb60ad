"""What a decoder-only model is, apart from its weights. Standard library only.

A family reader (``families.py``) makes a :class:`DecoderSpec` from a Hugging Face config; the
decoder, the weight rules and the memory plan read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware base for contexts beyond the trained one (bloc97, emozilla 2023).

    The base is that of the longest context *served*: with the trained length or less the plain
    frequencies. Hugging Face changes it as a sequence grows, which makes a token's logits depend
    on when its predecessors were cached.
    """

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """Frequencies interpolated by part, attention scaled (YaRN, Peng et al. 2023)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """A factor for each frequency, one set for short and one for long contexts (LongRoPE).

    The long set is taken when the longest context *served* exceeds the original one, for every
    sequence: a token's logits must not depend on how long its neighbours are.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over all of ``head_dim``."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Where layers of one model may differ."""

    window: int | None = None  # positions seen, the token's own included; None: all
    rope: bool = True  # False: no position embedding in this layer (NoPE)


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder of the Llama kind: pre-norm, rotary positions, gated MLP with SiLU."""

    architecture: str  # Hugging Face model_type
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head's query and key before rope
    attention_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None  # as config.json tells it

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    @property
    def default_context(self) -> int:
        """Longest context that is served without being asked for, in tokens."""
        scaling = self.rope.scaling
        if isinstance(scaling, DynamicScaling):
            return self.max_position_embeddings
        return self.longest_context

    @property
    def longest_context(self) -> int:
        """Longest context the position embedding is made for, in tokens."""
        scaling, trained = self.rope.scaling, self.max_position_embeddings
        if isinstance(scaling, LinearScaling | DynamicScaling):
            return int(trained * scaling.factor)
        if isinstance(scaling, YarnScaling):
            return max(trained, int(scaling.original_max_position_embeddings * scaling.factor))
        return trained

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """``2 * layers * kv_heads * head_dim * itemsize``."""
        return 2 * self.num_layers * self.kv_size * itemsize
