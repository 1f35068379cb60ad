"""Attention of a text to itself and to a source (encoder-decoder models), on any backend.

A sequence begins with the places of its *source*, the output of an encoder, and its text follows:

    places   0 ........ num_positions ... num_places ............
             source: keys and values      text: keys and values
             of cross-attention           of self-attention

Both kinds of keys and values lie in the same cache of a layer, at different places, and a sequence
has one block table. A text's token attends twice in each layer:

    to its text     the rows' block tables without the source's whole blocks, and lengths without
                    its places; causal
    to its source   each token is a row of its own over the unchanged block table, which ends
                    behind the source

So both are ordinary attention, and the inner backend computes them without knowing of sources.
Tokens at the source's places attend to nothing; their keys and values are all that is computed of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    DeviceGeometry,
    LayerAttention,
    LayerCache,
    SourcePlaces,
)
from kernels.transfer import to_device


class LengthOperations(Protocol):
    """The kernels that derive lengths; part of ``kernels.operations.Operations``."""

    def places_behind(self, values: torch.Tensor, begin: int, /) -> torch.Tensor:
        """See ``kernels.reference.source``."""
        ...

    def selected_lengths(self, seq_lens: torch.Tensor, top_k: int, /) -> torch.Tensor:
        """See ``kernels.reference.sparse``."""
        ...


@dataclass(frozen=True, slots=True)
class SourceState:
    """The plans of a step, for the tokens of its texts."""

    text_indices: torch.Tensor | None  # [n] int64, which of the step's tokens; None: all
    to_text: Any  # None, as is ``to_source``, in a step without texts
    to_source: Any


class SourceAttention:
    """A backend for such models, built on one that knows of no sources.

    Queries and what ``forward`` returns are of the texts' tokens alone.

    Args:
        inner: attends.
        operations: derive lengths.
    """

    def __init__(self, inner: AttentionBackend, operations: LengthOperations) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable
        self._inner = inner
        self._operations = operations

    def refuse(self, spec: AttentionSpec) -> str | None:
        """See ``AttentionBackend.refuse``."""
        if _source(spec).num_places % spec.block_size:
            places = _source(spec).num_places
            return f"a source of {places} places is not made of blocks of {spec.block_size}"
        return self._inner.refuse(spec)

    def can_replay(
        self, captured: BatchGeometry, actual: BatchGeometry, spec: AttentionSpec
    ) -> bool:
        """See ``AttentionBackend.can_replay``."""
        return all(
            self._inner.can_replay(bounds, batch, spec)
            for bounds, batch in zip(
                self._of_decode(captured, spec), self._of_decode(actual, spec), strict=True
            )
        )

    def plan(self, geometry: BatchGeometry, spec: AttentionSpec) -> SourceState:
        """See ``AttentionBackend.plan``.

        A step of single tokens is one of texts: such steps are captured.
        """
        if geometry.is_decode and bool((geometry.seq_lens > _source(spec).num_places).all()):
            indices, (text, source) = None, self._of_decode(geometry, spec, on_device=True)
        else:
            chosen = _texts(geometry, spec)
            if chosen is None:
                nothing = torch.empty(0, dtype=torch.int64, device=spec.device)
                return SourceState(nothing, None, None)
            indices, text, source = chosen
        return SourceState(indices, self._inner.plan(text, spec), self._inner.plan(source, spec))

    def forward(
        self,
        state: SourceState,
        layer: LayerAttention,
        query: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        plan = state.to_source if layer.reads_source else state.to_text
        return self._inner.forward(plan, layer, query, cache)

    def _of_decode(
        self, geometry: BatchGeometry, spec: AttentionSpec, *, on_device: bool = False
    ) -> tuple[BatchGeometry, BatchGeometry]:
        """Return the geometries of attention to text and to source in a step of single tokens.

        Lengths are derived on the device, where a captured step reads its own.
        """
        own, (positions, places) = geometry.device, _source(spec)
        text, source = own, own
        if on_device:
            text = own._replace(
                seq_lens=self._operations.places_behind(own.seq_lens, places),
                tables=_behind(own.tables, places // spec.block_size),
            )
            lengths = self._operations.selected_lengths(own.seq_lens, positions)
            source = own._replace(seq_lens=lengths)
        starts, slots = geometry.query_start, geometry.slots
        # Bounds of captured steps may be less than a source has places.
        lens = np.maximum(geometry.seq_lens - np.int32(places), np.int32(1))
        tables = geometry.tables[:, places // spec.block_size :]
        capped = np.minimum(geometry.seq_lens, np.int32(positions))
        return (
            BatchGeometry(starts, lens, slots, tables, text),
            BatchGeometry(starts, capped, slots, geometry.tables, source),
        )


def _source(spec: AttentionSpec) -> SourcePlaces:
    assert spec.source is not None, "a model without a source"
    return spec.source


def _texts(
    geometry: BatchGeometry, spec: AttentionSpec
) -> tuple[torch.Tensor, BatchGeometry, BatchGeometry] | None:
    """Return the indices of the tokens of texts, and the geometries of both attentions; None if
    there are no such tokens."""
    positions, places = _source(spec)
    counts = np.diff(geometry.query_start)
    lens = geometry.seq_lens - np.int32(places)
    in_text = np.clip(lens, 0, counts).astype(np.int32)  # of each row's tokens, the last ones
    if not in_text.any():
        return None
    ends = np.repeat(geometry.query_start[1:], in_text)
    within = np.arange(in_text.sum()) - np.repeat(np.cumsum(in_text), in_text)
    indices = to_device(torch.from_numpy(ends + within), spec.device)
    kept = in_text > 0
    starts = np.append(0, np.cumsum(in_text[kept])).astype(np.int32)
    host = starts, lens[kept].astype(np.int32), geometry.slots[kept]
    tables = _behind(geometry.device.tables, places // spec.block_size)
    text = BatchGeometry(
        *host,
        geometry.tables[:, places // spec.block_size :],
        _on_device(host, tables, spec),
    )
    size = int(starts[-1])
    each = (
        np.arange(size + 1, dtype=np.int32),
        np.full(size, positions, np.int32),
        np.repeat(geometry.slots, in_text).astype(np.int32),
    )
    on_device = _on_device(each, geometry.device.tables, spec)
    return indices, text, BatchGeometry(*each, geometry.tables, on_device)


def _on_device(
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray], tables: torch.Tensor, spec: AttentionSpec
) -> DeviceGeometry:
    query_start, seq_lens, slots = (
        to_device(torch.from_numpy(np.ascontiguousarray(each)), spec.device) for each in arrays
    )
    return DeviceGeometry(query_start, seq_lens, slots, tables)


def _behind(tables: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return block tables without their first blocks, as a view of lines of the same width.

    Kernels address an entry by the line and the width, so a line goes on into the next one, of
    which nothing is read. The last line, the spare one of the runner's table, is left out.
    """
    lines, width = tables.shape
    return tables.as_strided((lines - 1, width), (width, 1), tables.storage_offset() + num_blocks)
