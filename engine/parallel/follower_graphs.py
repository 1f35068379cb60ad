"""Captured steps on a follower rank: what rank 0 captures and replays, on this rank's shard.

A follower keeps no rows between steps, so every step brings its block tables; they are written to
lines that the captured kernels read, one for each row in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.lora.batch import CapturedAdapters
from engine.lora.store import AdapterStore
from engine.models.decoder import Decoder
from engine.parallel.frames import Forward, unpack
from engine.runner.captured_batches import (
    decode_bounds,
    longest_row,
    pad_prompt,
    padded_rows,
    prompt_bounds,
)
from engine.runner.graphs import Capture, Replay
from engine.runner.inputs import HostBatch
from engine.runner.step_builder import StepBuilder
from engine.runner.step_peers import GraphKey
from engine.runner.transfer import Uploads
from kernels.attention import AttentionSpec
from kernels.inputs import StepRows
from kernels.operations import Kernels


class SentLines(NamedTuple):
    """See ``RowLines``; the tokens of a follower's rows come from rank 0."""

    host_tables: np.ndarray
    tables: torch.Tensor
    newest: torch.Tensor


class _FollowerGraph(NamedTuple):
    """A captured step."""

    packed: torch.Tensor  # int32, what is sent for a step: see ``_columns``
    forward: Replay
    launch: Callable[[], object]  # does the same without the graph
    adapters: CapturedAdapters | None  # of its rows; None: they have none
    version: int  # of the store of adapters, at capturing time


class FollowerGraphs:
    """The steps that have been captured so far.

    Args:
        model, cache, kernels, spec: this rank's.
        builder: of its steps.
        num_lines: the most rows of a step, and the line of states that padding rows have.
        max_num_blocks: the most blocks of one sequence.
        capture: records what a step launches.
        adapters: this rank's shard of the rows' adapters.
        has_rotary_positions: tokens may have rotary positions other than their own.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        kernels: Kernels,
        spec: AttentionSpec,
        builder: StepBuilder,
        num_lines: int,
        max_num_blocks: int,
        capture: Capture,
        adapters: AdapterStore,
        *,
        has_rotary_positions: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self._operations = kernels.operations
        self._spec = spec
        self._builder = builder
        self._padding_line = num_lines
        self._capture = capture
        self._adapters = adapters
        self._has_turns = has_rotary_positions
        most_rows = padded_rows(num_lines + 2, num_lines)  # of any graph
        host_tables = np.zeros((most_rows, max_num_blocks), np.int32)
        tables = torch.zeros(host_tables.shape, dtype=torch.int32, device=spec.device)
        newest = torch.zeros(most_rows, dtype=torch.int64, device=spec.device)
        self._lines = SentLines(host_tables, tables, newest)
        self._graphs: dict[GraphKey, _FollowerGraph] = {}
        self._uploads = Uploads(spec.device)

    def capture(self, key: GraphKey) -> None:
        """Capture a step while rank 0 does.

        Raises:
            NotCapturedError: this rank could not; it has communicated as if it could.
        """
        model, layers, device = self._model, self._cache.layers, self._spec.device
        num_rows, is_decode = key.num_rows, key.num_tokens is None
        assert num_rows <= len(self._lines.tables), "each row reads a line"
        bounds = self._bounds(key)
        columns = self._columns(_pad(key, _nothing(key)), _NO_NUMBERS, _NO_NUMBERS)
        sizes = [column.size for column in columns]
        packed = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        self._uploads.fill(packed, columns)
        query_start, starts, state_lines, turns = packed.split(sizes)
        slots = torch.arange(num_rows, dtype=torch.int32, device=device)
        token_ids = torch.zeros(bounds.token_ids.size, dtype=torch.int32, device=device)
        rows = StepRows(slots, query_start, starts, token_ids)
        adapters: CapturedAdapters | None = None
        if key.adapted:
            given = self._operations, self._uploads
            adapters = CapturedAdapters(self._adapters, num_rows, key.num_tokens, *given)

        def forward() -> torch.Tensor:
            given = turns if turns.numel() else None
            built = self._builder.build(bounds, rows, self._lines, rotary_positions=given)
            state = replace(built.state, rows=rows._replace(slots=state_lines))
            if adapters is not None:
                state = adapters.applied(state)
            wanted = None if is_decode else query_start[1:] - 1
            hidden = model.forward(built.inputs.input_ids, state, layers, wanted)
            return model.raw_logits(hidden) if is_decode else hidden

        replay, _ = self._capture(forward)
        version = self._adapters.version
        self._graphs[key] = _FollowerGraph(packed, replay, forward, adapters, version)

    def replay(
        self, key: GraphKey, message: Forward, batch: HostBatch, adapted: np.ndarray | None
    ) -> None:
        """Compute a step.

        Args:
            key: names its graph.
            message: the step.
            batch: the same rows.
            adapted: [R] int64, the slots of their adapters; None: they have none.
        """
        graph, padded = self._graphs[key], _pad(key, batch)
        turns = unpack(message.rotary_positions)
        columns = self._columns(padded, unpack(message.lines), turns)
        self._uploads.fill(graph.packed, columns)
        num_rows = batch.slots.size
        (tables,) = self._uploads.send([unpack(message.tables).reshape(num_rows, -1)])
        self._lines.tables[:num_rows, : tables.shape[1]] = tables
        if graph.adapters is None or adapted is None:
            graph.forward()
            return
        graph.adapters.set(adapted, np.diff(batch.query_start))
        # Adapters move when rank 0's do, unless a step failed there before it was sent here.
        run = graph.forward if self._adapters.version == graph.version else graph.launch
        run()

    def _bounds(self, key: GraphKey) -> HostBatch:
        longest = longest_row(key.num_rows, self._cache, self._lines, self._spec)
        if key.num_tokens is None:
            return decode_bounds(key.num_rows, longest, self._padding_line)
        num_slots = key.num_rows * longest
        return prompt_bounds(key.num_tokens, key.num_rows, num_slots, self._padding_line)

    def _columns(
        self, padded: HostBatch, state_lines: np.ndarray, turns: np.ndarray
    ) -> list[np.ndarray]:
        """Return what is sent for a step: where rows begin and from which position, their lines of
        states, and the rotary positions, if tokens may have such."""
        lines = np.full(padded.slots.size, self._padding_line, np.int32)
        lines[: state_lines.size] = state_lines
        turning = padded.positions if self._has_turns else _NO_NUMBERS
        turning[: turns.size] = turns
        return [padded.query_start, padded.starts, lines, turning]


_NO_NUMBERS = np.empty(0, np.int32)


def _nothing(key: GraphKey) -> HostBatch:
    """Make the step that a graph computes before any is loaded: a row with all tokens, before
    position 0, or no row."""
    size = key.num_tokens or 0
    row = np.zeros(min(size, 1), np.int32)
    query_start = np.array([0, size][: row.size + 1], np.int32)
    return HostBatch(row, query_start, row - size, np.zeros(size, np.int32), row)


def _pad(key: GraphKey, batch: HostBatch) -> HostBatch:
    """Add what a step lacks, as rank 0 does."""
    size = key.num_rows
    if key.num_tokens is not None:
        return pad_prompt(batch, size, key.num_tokens, padding_slot=0)
    starts = np.full(size, -1, np.int32)
    starts[: batch.starts.size] = batch.starts
    places = np.arange(size + 1, dtype=np.int32)
    return HostBatch(places[:-1], places, starts, np.zeros(size, np.int32), places[:-1])
