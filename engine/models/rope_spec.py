"""The rotary position embedding of a decoder, as data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware base for contexts beyond the trained one (bloc97, emozilla 2023).

    The base is computed for the longest context *served*; up to the trained length, frequencies are
    unscaled. Hugging Face changes the base as a sequence grows, so that a token's logits depend on
    when its predecessors were cached.
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
    """A factor for each frequency, with one set for short and one for long contexts (LongRoPE).

    The long set is used for every sequence if the longest context *served* exceeds the original
    one: a token's logits must not depend on the length of other sequences.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    long_attention_factor: float | None = None  # of the long set, if it has its own (Phi-3.5-MoE)


@dataclass(frozen=True)
class ProportionalScaling:
    """The frequencies of the whole head, of which only the first ``share`` rotate (Gemma 4)."""

    share: float


RopeScaling = (
    LinearScaling
    | DynamicScaling
    | Llama3Scaling
    | YarnScaling
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True)
class MropeSpec:
    """Positions in three dimensions (M-RoPE, Wang et al. 2024).

    An image token's position is a time, a row and a column; for text all three are equal.
    ``sections`` are the numbers of frequencies that each dimension rotates, in consecutive sections
    or, if ``interleaved``, every third by the row and every third by the column, up to these
    numbers.
    """

    sections: tuple[int, int, int]
    interleaved: bool = False

    def axis(self, frequency: int) -> int:
        """Return which dimension rotates a frequency: 0 the time, 1 the row, 2 the column."""
        if self.interleaved:
            axis = frequency % 3
            return axis if frequency < 3 * self.sections[axis] else 0
        first, second, _ = self.sections
        return int(frequency >= first) + int(frequency >= first + second)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    Halves of a head are rotated against each other, or adjacent dimensions if ``interleaved``; with
    ``num_dims``, only a head's first dimensions.
    """

    theta: float
    scaling: RopeScaling | None = None
    num_dims: int | None = None  # even; None: all of head_dim
    interleaved: bool = False
    mrope: MropeSpec | None = None  # None: positions have one dimension
    clockwise: bool = False  # by negative angles (nanochat)
