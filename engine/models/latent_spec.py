"""Multi-head latent attention as data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IndexerSpec:
    """The indexer of sparse attention (``engine/models/indexer.py``)."""

    num_heads: int
    head_dim: int
    top_k: int  # positions that a query attends to
    interleaved: bool  # rotated dimensions are neighbours in checkpoints, not in two halves
    eps: float = 1e-6  # of the norm of its keys


@dataclass(frozen=True)
class LatentSpec:
    """The widths of multi-head latent attention (``engine/models/latent.py``)."""

    rank: int  # of the latent for keys and values
    query_rank: int | None  # of the queries' latent; None: made from the hidden state
    nope_dim: int  # of a head's query and key, without rotary dimensions
    rope_dim: int  # of the rotated part; all heads share a key's
    value_dim: int  # of a head's value
    eps: float = 1e-6  # of the norms of latents
    scale: float = 1.0  # factor of the normed latent for keys and values
    indexer: IndexerSpec | None = None  # None: queries attend to all positions
    # The queries' latent makes gates of attention's output, too, and is read before its norm as
    # well as after it (A.X K2).
    gates_output: bool = False

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def query_inputs(self) -> int | None:
        """Width of what makes queries from their latent; None: there is none."""
        return self.query_rank and self.query_rank * (2 if self.gates_output else 1)

    @property
    def query_outputs(self) -> int:
        """Width of what is made of it for a head: its query, and any gates."""
        return self.query_dim + (self.value_dim if self.gates_output else 0)

    def qkv_sizes(self, num_heads: int) -> tuple[int, int]:
        """Widths of a token's first projection: the queries' input, and the latent with the
        key's rotated part."""
        queries = self.query_rank or num_heads * self.query_dim
        return queries, self.rank + self.rope_dim
