"""Attention over a paged KV cache: the data types and the protocol of a backend.

    geometry of a step ──► backend.plan() ──► state ──► backend.forward() once a layer

A backend is chosen once, at start (``kernels/select.py``). ``plan`` makes a step's state, which is
passed to ``forward`` as an argument; nothing is kept between steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

Heads = tuple[int, int, int]  # numbers of query and KV heads, and their width


class KVHeadSpec(NamedTuple):
    """The heads of layers that differ from the model's other layers."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # the distinct windows of these layers
    num_heads: int  # of queries


class SelectionSpec(NamedTuple):
    """How queries select the positions that they attend to (``kernels/sparse.py``)."""

    top_k: int  # positions
    num_heads: int  # of the indexer
    head_dim: int


class SourcePlaces(NamedTuple):
    """The places of each sequence that hold an encoder's output (``kernels/source.py``)."""

    num_positions: int  # that are attended to, from place 0 on
    num_places: int  # whole blocks; the text begins behind them


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model needs of its attention; a backend refuses what it does not support."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = (None,)  # the distinct windows of the layers, in tokens
    softcap: float | None = None
    has_sinks: bool = False
    has_slopes: bool = False
    # Some layers' queries see their own chunk of so many positions alone.
    chunk_size: int | None = None
    value_dim: int | None = None  # values are the first numbers of the keys; None: by themselves
    cache_dtype: torch.dtype | None = None  # of the codes that the cache holds; None: it has dtype
    # Some layers keep a state of each sequence, and do not attend.
    has_recurrent_layers: bool = False
    has_attention_layers: bool = True  # False: heads and windows are those of no layer
    has_experts: bool = False  # some layers are mixtures of experts
    is_bidirectional: bool = False  # queries of a chunk may see positions of it behind their own
    other_heads: tuple[KVHeadSpec, ...] = ()  # of layers with heads of another kind
    selection: SelectionSpec | None = None  # None: queries attend to all of their positions
    source: SourcePlaces | None = None  # None: sequences are text from their first place on

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of keys and values in the cache."""
        return self.cache_dtype or self.dtype

    def by_heads(self) -> dict[Heads, AttentionSpec]:
        """Return the specs of the kinds of heads here.

        On a rank with one head of each kind, two kinds may coincide.
        """
        windows: dict[Heads, dict[int | None, None]] = {}
        own = KVHeadSpec(self.num_kv_heads, self.head_dim, self.windows, self.num_heads)
        for kind in (own, *self.other_heads):
            seen = windows.setdefault((kind.num_heads, kind.num_kv_heads, kind.head_dim), {})
            seen.update(dict.fromkeys(kind.windows))
        return {
            (num_heads, num_kv_heads, dim): replace(
                self,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=dim,
                windows=tuple(seen),
                other_heads=(),
            )
            for (num_heads, num_kv_heads, dim), seen in windows.items()
            if seen or not self.other_heads
        }


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention: ``softmax(softcap(q k^T * scale + bias) + mask) v``.

    The mask is causal unless the step's geometry says otherwise; a query at position p attends to
    the ``window`` positions (p - window, p]. A sink is an additional score in each softmax without
    a value: it takes weight and adds nothing. The bias is that of ALiBi (Press et al. 2022): a
    head's slope times the key's distance from the query, which is below 0 for keys before it.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None  # c * tanh(x / c), as in Gemma 2
    # [num_heads] float32, as in GPT-OSS
    sinks: torch.Tensor | None = field(default=None, compare=False)
    chunk_size: int | None = None  # queries see their own chunk of positions alone (Llama 4)
    # Queries attend up to the step's ``query_ends``, if there are any.
    is_bidirectional: bool = False
    reads_source: bool = False  # queries attend to all of the source, and to nothing else
    # [num_heads] float32; None: no bias
    slopes: torch.Tensor | None = field(default=None, compare=False)


class LayerCache(NamedTuple):
    """One layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim].

    Each is contiguous, or interleaved with those of other layers for kernels that support it: the
    first block of each layer, then the second of each, and so on.

    In latent attention the values are a view of the keys: the first ``value_dim`` numbers of each
    (``engine/models/latent.py``). Elsewhere both may be codes of
    ``kernels/reference/cache_quantisation.py``, with a scale for each token and KV head.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None  # [num_blocks, num_kv_heads, block_size] float32
    value_scales: torch.Tensor | None = None
    # [num_blocks, 1, block_size, index_dim], of an indexer (``kernels/sparse.py``)
    index_keys: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors with memory of their own; each begins with the blocks."""
        held = (self.keys, self.index_keys) if self.has_shared_values else self
        return tuple(tensor for tensor in held if tensor is not None)

    @property
    def block_stride_heads(self) -> int:
        """The distance between consecutive blocks, in KV heads of a block.

        It is the layer's number of KV heads or, for interleaved layers, that of all of them.
        """
        size, dim = self.keys.shape[2:]
        return self.keys.stride(0) // (size * dim)

    @property
    def has_shared_values(self) -> bool:
        """Whether the values are a view of the keys; otherwise both have the same width."""
        return self.values.shape[-1] != self.keys.shape[-1]


class DeviceGeometry(NamedTuple):
    """A :class:`BatchGeometry` on the kernels' device; all int32, contiguous."""

    query_start: torch.Tensor  # [num_rows + 1]
    seq_lens: torch.Tensor  # [num_rows]
    slots: torch.Tensor  # [num_rows]
    tables: torch.Tensor  # [lines, width]
    query_ends: torch.Tensor | None = None  # [num_tokens]


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """The layout of a ragged batch, on the host and on the device.

    Row i has query tokens [query_start[i], query_start[i + 1]) of the batch. They are the last ones
    of its ``seq_lens[i]`` tokens, of which token p is in block ``tables[slots[i], p //
    block_size]``.

    In a batch that is captured in a CUDA graph the host arrays are *bounds*: they determine the
    grids, and each replay reads its own lengths on the device, none of which exceeds its bound. A
    row of length 0 is padding there.

    For layers with ``is_bidirectional``, ``query_ends`` may give each query's end: one past the
    last position that it attends to, which may be a later position computed in the same step.
    Rows of single queries attend to all of their tokens. The beginning of a window does not
    change.
    """

    query_start: np.ndarray  # [num_rows + 1] int32, starts with 0
    seq_lens: np.ndarray  # [num_rows] int32, this step's tokens included
    slots: np.ndarray  # [num_rows] int32, each row's line of the tables
    tables: np.ndarray  # [lines, width] int32, block ids; arbitrary where unused
    device: DeviceGeometry
    # [num_tokens] int32; None: queries attend up to themselves.
    query_ends: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        query_start: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
        device: torch.device,
        query_ends: np.ndarray | None = None,
    ) -> BatchGeometry:
        """Make a geometry from host arrays, with ``block_tables[i]`` the blocks of row i."""
        slots = np.arange(len(seq_lens), dtype=np.int32)
        query_start, seq_lens = query_start.astype(np.int32), seq_lens.astype(np.int32)
        tables = block_tables.astype(np.int32)
        host = [query_start, seq_lens, slots, tables]
        if query_ends is not None:
            query_ends = query_ends.astype(np.int32)
            host.append(query_ends)
        on_device = DeviceGeometry(*(torch.from_numpy(each).to(device) for each in host))
        return cls(query_start, seq_lens, slots, tables, on_device, query_ends)

    @property
    def num_rows(self) -> int:
        """Number of rows in the batch."""
        return self.seq_lens.size

    @property
    def is_decode(self) -> bool:
        """Whether every row has a single query."""
        return int(self.query_start[-1]) == self.num_rows

    def block_tables(self, block_size: int) -> np.ndarray:
        """Return each row's blocks, padded to the longest: [num_rows, blocks] int64."""
        width = -(-int(self.seq_lens.max()) // block_size)
        return self.tables[self.slots, :width].astype(np.int64)


class AttentionBackend(Protocol):
    """An implementation of paged attention."""

    name: str
    is_capturable: bool  # plan and forward may be captured, or recorded on a CPU

    def refuse(self, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve the model here, or None if it can."""
        ...

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """Return whether a capture with these bounds serves a batch with no more rows."""
        ...

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> Any:
        """Compute what the layers of one step share: index tensors, masks, splits."""
        ...

    def forward(
        self,
        state: Any,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """Attend to the cache, in which this step's keys and values are stored already.

        Args:
            state: the result of ``plan`` for this step.
            layer: the layer's scale, window and cap.
            query: [num_tokens, num_heads, head_dim].
            cache: the layer's blocks.

        Returns:
            [num_tokens, num_heads, head_dim or value_dim] in the query's dtype.
        """
        ...
