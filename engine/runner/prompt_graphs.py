"""Steps with short prompts as CUDA graphs: what launches longer than it computes is replayed.

    rows, padded to a size ─► [ inputs ─ attention plan ─ layers ] ─► logits ─► sample ─► feed back

A graph serves any step of up to its number of tokens, whether they are prompts, chunks of prompts
or texts beside them: the host tells it where rows begin, and the attention is planned on the
device. The tokens that a step lacks belong to a last row that holds nothing, and rows that it lacks
have no tokens. Logits and sampling are launched as usual: they are few kernels, of any kind.

Large steps are not captured, because their kernels run for longer than they take to launch, and the
overlapped loop launches them ahead of time. How large depends on the model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.models.decoder import Decoder, StepState
from engine.models.loader import num_parameters
from engine.models.spec import DecoderSpec
from engine.runner.graphs import Capture, Replay, longest_row
from engine.runner.inputs import DeviceBatch, HostBatch, geometry
from engine.runner.mrope import MRopePositions
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from kernels.attention import AttentionSpec, BatchGeometry
from kernels.inputs import StepInputs, StepRows
from kernels.operations import Kernels

logger = logging.getLogger(__name__)

_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens
# Up to here reading the weights takes longest, so that padding costs nothing.
_ALWAYS_CAPTURED = 64
# Of a layer: the host of an H200 took 10 to 15 ms for a step of 28 layers.
_LAUNCH_S = 400e-6
_FLOPS_PER_S = 400e12  # of an H200, in products of some hundred rows
# More rows with several tokens make a tile each, which all sizes would have to provide for.
_MAX_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A captured number of tokens."""

    packed: torch.Tensor  # int32, all that the host sends, of which these are slices
    rows: StepRows  # the last row holds the padding
    sampling_rows: torch.Tensor  # [rows] int32
    bounds: BatchGeometry
    inputs: StepInputs
    state: StepState
    hidden: torch.Tensor  # [rows, hidden_size], of each row's last token
    forward: Replay

    @property
    def num_rows(self) -> int:
        """Number of rows, the padding included."""
        return self.bounds.num_rows

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.rows.token_ids.shape[0]


class PromptGraphs:
    """The captured sizes; they are captured one at a time when the engine has time, largest first.

    Args:
        model, cache, kernels, spec, rows: the runner's, if ``can_capture`` says so.
        max_num_rows: the most rows of a step.
        max_num_tokens: the most tokens of a step.
        capture: records what a step launches.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        kernels: Kernels,
        spec: AttentionSpec,
        rows: RowTable,
        max_num_rows: int,
        max_num_tokens: int,
        capture: Capture,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._spec = spec
        self._rows = rows
        self._max_num_rows = max_num_rows
        self._capture = capture
        self._graphs: dict[int, PromptGraph] = {}
        self._to_capture = prompt_sizes(model.spec, max_num_tokens)  # ascending
        self._sizes = tuple(self._to_capture)

    def load(self, batch: HostBatch, uploads: Uploads) -> tuple[PromptGraph, DeviceBatch] | None:
        """Copy a step to the inputs of the smallest graph that fits it, with the table's changes.

        The step has no tokens of images.

        Returns:
            The graph, and the step as it lies in its inputs; None if no graph fits.
        """
        count = batch.token_ids.size
        for size in self._sizes:
            # While the larger sizes alone are captured, padding might cost more than launching.
            if count <= size <= 2 * count + 16 and (graph := self._graphs.get(size)):
                return self._load(graph, batch, uploads)
        return None

    def _load(
        self, graph: PromptGraph, batch: HostBatch, uploads: Uploads
    ) -> tuple[PromptGraph, DeviceBatch] | None:
        if batch.slots.size >= graph.num_rows:
            return None
        table = self._rows
        padded = _padded(batch, graph.num_rows, graph.num_tokens, table.padding_slot)
        known = padded.query_start, padded.seq_lens, padded.slots, table.host_tables
        actual = BatchGeometry(*known, graph.bounds.device)
        if not self._kernels.attention.can_replay(graph.bounds, actual, self._spec):
            return None
        changes = table.changes()
        if any(array.size for array in changes):
            table.write(*uploads.send(changes))
        arrays = [padded.slots, padded.query_start, padded.starts, padded.token_ids]
        arrays.append(np.resize(batch.sampling_rows, graph.num_rows))
        if table.mrope is not None:
            arrays.append(_rotary_positions(batch, padded, table.mrope))
        uploads.fill(graph.packed, arrays)
        nothing = graph.packed[:0]
        sampling_rows = graph.sampling_rows[: batch.sampling_rows.size]
        return graph, DeviceBatch(graph.rows, sampling_rows, nothing, nothing)

    def capture_next(self) -> bool:
        """Capture one more size; return whether more remain.

        If a capture fails, steps of this size and of those that remain run without graphs.
        """
        if not self._to_capture:
            return False
        size = self._to_capture.pop()
        try:
            self._graphs[size] = self._capture_size(size)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning(
                "steps with prompts, of %d tokens and fewer, are not captured: %s", size, reason
            )
            self._to_capture.clear()
            return False
        if not self._to_capture:
            logger.info("captured steps with prompts of %d sizes", len(self._graphs))
        return bool(self._to_capture)

    def _capture_size(self, size: int) -> PromptGraph:
        device, table = self._spec.device, self._rows
        num_rows = min(size, self._max_num_rows) + 1
        packed, rows, sampling_rows, turns = _packed(size, num_rows, table, device)
        num_slots = num_rows * longest_row(num_rows, self._cache, table, self._spec)
        batch = _bounding_batch(size, num_rows, num_slots, table.padding_slot)
        operations, block_size = self._kernels.operations, self._spec.block_size

        def forward() -> tuple[BatchGeometry, StepInputs, StepState, torch.Tensor]:
            inputs = operations.build_inputs(rows, table.newest, table.tables, block_size, size)
            bounds = geometry(batch, rows, inputs.seq_lens, table)
            state = StepState(
                attention=self._kernels.attention.plan(bounds, self._spec),
                slot_mapping=inputs.slot_mapping,
                positions=inputs.positions,
                rotations=self._model.rotations(turns if turns.numel() else inputs.positions),
                rows=rows,
            )
            last_tokens = rows.query_start[1:] - 1  # a row without any has those of the one before
            hidden = self._model.forward(inputs.input_ids, state, self._cache.layers, last_tokens)
            return bounds, inputs, state, hidden

        replay, left = self._capture(forward)
        return PromptGraph(packed, rows, sampling_rows, *left, replay)


def can_capture(spec: AttentionSpec) -> bool:
    """Return whether steps with prompts can be captured: nothing of them is planned on the host."""
    is_planned = spec.chunk_size is not None or spec.selection is not None
    return not (is_planned or spec.has_recurrent_layers or spec.source is not None)


def prompt_sizes(spec: DecoderSpec, max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending: as long as launching takes longer."""
    share = 1.0 if spec.moe is None else spec.moe.top_k / spec.moe.num_experts
    flops_per_token = 2.0 * num_parameters(spec) * share
    limit = spec.num_layers * _LAUNCH_S * _FLOPS_PER_S / flops_per_token
    most = min(max(limit, _ALWAYS_CAPTURED), max_num_tokens)
    return [size for size in _SIZES if size <= most]


def _packed(
    size: int, num_rows: int, table: RowTable, device: torch.device
) -> tuple[torch.Tensor, StepRows, torch.Tensor, torch.Tensor]:
    """Return what the host sends, filled with padding, and slices of it.

    Returns:
        All of it, int32; the rows; the sampling rows; and the tokens' rotary positions, [size] if
        they are not their places in the sequence, else [0].
    """
    sizes = (num_rows, num_rows + 1, num_rows, size, num_rows, size if table.mrope else 0)
    packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    slots, query_start, starts, token_ids, sampling_rows, turns = packed.split(sizes)
    slots.fill_(table.padding_slot)
    query_start[1:], starts[0] = size, -size  # until a step is loaded, the first row has all
    return packed, StepRows(slots, query_start, starts, token_ids), sampling_rows, turns


def _padded(batch: HostBatch, num_rows: int, size: int, padding_slot: int) -> HostBatch:
    """Add the rows and tokens that a step lacks; the last row has the tokens, before position 0."""
    count, num_tokens = batch.slots.size, batch.token_ids.size
    slots = np.full(num_rows, padding_slot, np.int32)
    query_start = np.full(num_rows + 1, num_tokens, np.int32)
    starts, token_ids = np.zeros(num_rows, np.int32), np.zeros(size, np.int32)
    slots[:count], starts[:count], starts[-1] = batch.slots, batch.starts, num_tokens - size
    query_start[: count + 1], query_start[-1] = batch.query_start, size
    token_ids[:num_tokens] = batch.token_ids
    return HostBatch(slots, query_start, starts, token_ids, batch.sampling_rows)


def _rotary_positions(batch: HostBatch, padded: HostBatch, mrope: MRopePositions) -> np.ndarray:
    """[size] int32; text has one position on all three axes, which images before it move."""
    found, moved = padded.positions, mrope.of(batch)
    if moved is not None:
        found[: batch.token_ids.size] = moved[0]
    return found


def _bounding_batch(size: int, num_rows: int, num_slots: int, padding_slot: int) -> HostBatch:
    """Make a batch on the host with no fewer tiles and splits than those that a size serves.

    It has one chunk of all tokens and others of two, and texts that fill ``num_slots`` of the
    cache: more than there can be, so it bounds the plan alone.
    """
    num_chunks = min(_MAX_CHUNKS, num_rows - 1)
    lengths = np.ones(num_rows, np.int32)
    lengths[:num_chunks], lengths[0] = 2, size
    starts = np.zeros(num_rows, np.int32)
    starts[num_chunks:] = -(-num_slots // (num_rows - num_chunks))
    return HostBatch(
        slots=np.full(num_rows, padding_slot, np.int32),
        query_start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        starts=starts,
        token_ids=np.zeros(size, np.int32),
        sampling_rows=np.arange(num_rows, dtype=np.int32),
    )
