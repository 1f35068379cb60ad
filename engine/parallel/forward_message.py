"""Puts a step of rank 0's into the message from which the other ranks compute it."""

from __future__ import annotations

import numpy as np

from engine.parallel.frames import Forward, pack
from engine.runner.images import StepImages
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.runner.step_peers import GraphKey
from engine.types import Adapter


def forward_message(
    batch: HostBatch,
    table: RowTable,
    images: StepImages,
    block_size: int,
    graph: GraphKey | None,
    *,
    is_recurrent: bool,
    sampled_only: bool,
) -> Forward:
    """Return the message for a step; the arguments are those of ``Team.forward``.

    Args:
        batch, table, images, graph, sampled_only: see there.
        block_size: of the KV cache.
        is_recurrent: the model has recurrent layers.
    """
    adapters, places = _adapters(batch, table)
    width = -(-int(batch.seq_lens.max()) // block_size)
    turns = images.rotary_positions
    of_text = None if graph is None or table.mrope is None else table.mrope.of_text(batch)
    shown, num_deepstack = None, 0
    if images.tokens is not None and images.places is not None:
        shown, num_deepstack = images.places, len(images.tokens.deepstack)
    return Forward(
        query_start=pack(batch.query_start),
        starts=pack(batch.starts),
        tables=pack(table.host_tables[batch.slots, :width]),
        sampling_rows=pack(batch.sampling_rows) if sampled_only else None,
        adapters=adapters,
        adapter_rows=places,
        lines=pack(batch.slots) if is_recurrent else b"",
        rotary_positions=_packed(of_text if turns is None else turns.host),
        query_ends=_packed(None if images.attention_ends is None else images.attention_ends.host),
        image_places=_packed(shown),
        num_deepstack=num_deepstack,
        graph=graph,
    )


def _packed(array: np.ndarray | None) -> bytes:
    return b"" if array is None else pack(array)


def _adapters(batch: HostBatch, table: RowTable) -> tuple[tuple[Adapter, ...], bytes]:
    """Return the distinct adapters of the rows, and each row's index among them."""
    of_rows = [table.requests[slot].adapter for slot in batch.slots.tolist()]
    if not any(of_rows):
        return (), b""
    distinct = {adapter.id: adapter for adapter in of_rows if adapter is not None}
    places = {adapter_id: place for place, adapter_id in enumerate(distinct)}
    rows = [-1 if adapter is None else places[adapter.id] for adapter in of_rows]
    return tuple(distinct.values()), pack(np.array(rows))
