"""Decode steps as CUDA graphs: one replay in place of hundreds of launches.

A step in which every row has one token is captured for a ladder of batch sizes, in two pieces:

    packed rows ─► [ inputs ─ attention plan ─ layers ─ logits ] ─► [ sample ─ feed back ]

The second is replayed where no row asks for more than the parameter table says; else the sampler
runs by itself on the logits. A batch between two sizes is padded with rows of a spare slot that
hold no token. Lengths, block tables and newest tokens lie on the device, so the graph of a size
serves every batch that fits the bounds it was captured with.

Prompt chunks are not captured: their kernels run for longer than they take to launch, and the
overlapped loop launches them ahead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.lora.batch import RecordedAdapters
from engine.models.decoder import Decoder, StepState
from engine.runner.inputs import HostBatch, build, geometry
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from engine.runner.trials import RecordedTrial
from engine.speculation.features import Features
from kernels.attention import AttentionSpec, BatchGeometry
from kernels.inputs import StepRows
from kernels.operations import Kernels
from kernels.sampling import Sampled

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Replay = Callable[[], None]


class Capture(Protocol):
    """Records what functions launch."""

    def __call__(self, function: Callable[[], _T]) -> tuple[Replay, _T]:
        """What launches the same again, and where it leaves what ``function`` returned.

        Another replay may write there too: what it leaves is read on the same stream, before the
        next step's.
        """
        ...


# Of one size; larger ones share the room for theirs.
_OWN_LOGITS_BYTES = 16 << 20
# Sequences may share blocks, so their lengths together may exceed the cache's slots.
_SHARING = 2


class Greedy(NamedTuple):
    """A whole step whose rows all take the likeliest token; it leaves no logits behind."""

    replay: Replay
    sampled: Sampled  # [size]


class Kept(NamedTuple):
    """What a step leaves for a head that drafts; written to its table behind the forward pass."""

    slots: torch.Tensor  # [size] int64
    features: torch.Tensor  # [size, hidden_size]


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One batch size, captured."""

    packed: torch.Tensor  # [3 * size] int32: slots, starts, token ids; and ``turns`` on a GPU
    bounds: BatchGeometry
    logits: torch.Tensor  # [size, vocab] float32, or in the dtype that the head rounds to
    positions: torch.Tensor  # [size] int64, of the tokens to be chosen
    sampled: Sampled  # [size]
    kept: Kept | None  # for a head that drafts
    forward: Replay
    sample: Replay
    greedy: Greedy | None = None  # in place of both
    adapters: RecordedAdapters | None = None  # of its rows; None: they have none
    turns: torch.Tensor | None = None  # [size], see ``Turns``; None: rows turn by their places
    trial: RecordedTrial | None = None  # where it verifies drafts and the model keeps states

    @property
    def size(self) -> int:
        """Rows, those that pad included."""
        return self.bounds.num_rows

    @property
    def slots(self) -> torch.Tensor:
        """[size] int32, of the rows loaded last."""
        return self.packed[: self.size]

    @property
    def token_ids(self) -> torch.Tensor:
        """[size] int32, of the rows loaded last."""
        return self.packed[2 * self.size : 3 * self.size]


class DecodeGraphs:
    """The ladder: captured one by one when there is time, the largest first.

    Args:
        model, cache, kernels, spec, rows: the runner's.
        max_num_rows: of a step.
        capture: of what a step launches.
        features: of a head that drafts, if there is one.
        feeds_back: what is sampled is the rows' newest token.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        kernels: Kernels,
        spec: AttentionSpec,
        rows: RowTable,
        max_num_rows: int,
        capture: Capture,
        features: Features | None = None,
        *,
        feeds_back: bool = True,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._spec = spec
        self._rows = rows
        self._capture = capture
        self._features = features
        self._feeds_back = feeds_back
        self._graphs: dict[int, DecodeGraph] = {}
        self._to_capture = ladder(max_num_rows)  # the largest last
        self._sizes = tuple(self._to_capture)
        self._logits: torch.Tensor | None = None  # of the larger sizes, never run at once

    def find(
        self, batch: HostBatch, *, verifies: bool = False, adapted: bool = False
    ) -> DecodeGraph | None:
        """The smallest graph that holds the batch, whether or not it verifies drafts; None where
        running it as it is costs less, or rows have adapters: what adds these is not captured."""
        if adapted or not batch.is_decode or (verifies and self._model.spec.is_recurrent):
            return None
        num_rows = batch.slots.size
        for size in self._sizes:
            # Twice the rows cost less than the launches, for all but the largest models.
            if num_rows <= size <= 2 * num_rows + 8 and (graph := self._graphs.get(size)):
                actual = BatchGeometry(
                    batch.query_start,
                    batch.seq_lens,
                    batch.slots,
                    self._rows.host_tables,
                    graph.bounds.device,
                )
                fits = self._kernels.attention.fits(graph.bounds, actual, self._spec)
                return graph if fits else None
        return None

    def load(self, graph: DecodeGraph, batch: HostBatch, uploads: Uploads) -> None:
        """Bring a batch to where the graph reads it, padded, and what has changed in the table."""
        changes = self._rows.changes()
        if any(array.size for array in changes):  # a step in sixteen or so
            self._rows.write(*uploads.send(changes))
        padding = graph.size - batch.slots.size
        columns = [
            np.pad(batch.slots, (0, padding), constant_values=self._rows.spare_slot),
            np.pad(batch.starts, (0, padding), constant_values=-1),
            np.pad(batch.token_ids, (0, padding)),
        ]
        if self._rows.turns is not None:
            slots, starts, _ = columns
            columns.append(starts + self._rows.turns.ahead[slots])
        uploads.fill(graph.packed, columns)

    def capture_next(self) -> bool:
        """Capture one more size; whether there are more.

        Where one cannot be captured, for want of memory say, its steps and those of the sizes that
        are left stay as they are: slower, and right. A lost device shows with the next step.
        """
        if not self._to_capture:
            return False
        size = self._to_capture.pop()
        try:
            self._graphs[size] = self._capture_size(size)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("decode steps of %d rows and fewer are not captured: %s", size, reason)
            self._to_capture.clear()
            return False
        if not self._to_capture:
            logger.info("captured decode steps of %d sizes", len(self._graphs))
        return bool(self._to_capture)

    def _capture_size(self, size: int) -> DecodeGraph:
        device, table = self._spec.device, self._rows
        packed, rows = spare_rows(size, table, device)
        turns = None if table.turns is None else packed[3 * size :]
        batch = spare_batch(size, self._longest(size), table)
        # Read behind the next step's beginning, and so not where other replays may write.
        sampled = Sampled.empty(size, device)

        def forward() -> tuple[BatchGeometry, torch.Tensor, torch.Tensor, Kept | None]:
            inputs = build(batch, rows, table, self._spec.block_size, self._kernels.operations)
            bounds = geometry(batch, rows, inputs.seq_lens, table)
            state = StepState(
                attention=self._kernels.attention.plan(bounds, self._spec),
                slot_mapping=inputs.slot_mapping,
                positions=inputs.positions,
                rotations=self._model.rotations(inputs.positions if turns is None else turns),
                rows=rows,
            )
            given = inputs.input_ids, state, self._cache.layers
            kept = None
            if self._features is None:
                hidden = self._model.forward(*given)
            else:
                hidden, features = self._features.run(self._model, *given)
                kept = Kept(inputs.slot_mapping, features)
            logits = self._hold(self._model.raw_logits(hidden))
            return bounds, logits, inputs.next_positions, kept

        replay_forward, (bounds, logits, positions, kept) = self._capture(forward)

        def sample() -> None:
            do, parameters = self._kernels.operations, table.sampling.table
            do.sample(logits, rows.slots, positions, parameters, None, None, None, sampled)
            if self._feeds_back:
                do.feed_back(table.newest, rows.slots, sampled.token_ids, parameters.count_line)

        replay_sample, _ = self._capture(sample)
        given = packed, bounds, logits, positions, sampled, kept, replay_forward, replay_sample
        return DecodeGraph(*given, turns=turns)

    def _hold(self, logits: torch.Tensor) -> torch.Tensor:
        """Where a step's logits stay until its tokens are chosen: where they are, if each such size
        can have its own."""
        if logits.nbytes <= _OWN_LOGITS_BYTES:
            return logits
        held = self._logits
        if held is None or held.dtype != logits.dtype or len(held) < len(logits):
            held = self._logits = torch.empty_like(logits)
        return held[: len(logits)].copy_(logits)

    def _longest(self, size: int) -> int:
        """The bound of each row's length, so that all together hold what the cache can."""
        num_blocks, _, block_size, _ = self._cache.paged[0].keys.shape
        of_a_row = self._rows.host_tables.shape[1] * block_size
        return min(of_a_row, -(-_SHARING * num_blocks * block_size // size))


def ladder(max_num_rows: int) -> list[int]:
    """Sizes to capture: 1, 2, 4, then steps of 8 up to the most there can be."""
    sizes = [1, 2, 4, *range(8, max_num_rows, 8)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


def spare_rows(size: int, table: RowTable, device: torch.device) -> tuple[torch.Tensor, StepRows]:
    """Where a captured step reads its rows, and those that pad in it: [3 * size] int32, as rows,
    or on a GPU [4 * size] where the table has positions to turn by."""
    steps = torch.arange(size + 1, dtype=torch.int32, device=device)
    num_columns = 3 if table.turns is None or device.type == "cpu" else 4
    packed = torch.zeros(num_columns * size, dtype=torch.int32, device=device)
    packed[:size] = table.spare_slot
    packed[size : 2 * size] = -1
    slots, starts, token_ids, *_ = packed.split(size)
    return packed, StepRows(slots, steps, starts, token_ids)


def spare_batch(size: int, longest: int, table: RowTable) -> HostBatch:
    """A decode batch on the host that bounds those which the captured step will serve."""
    return HostBatch(
        slots=np.full(size, table.spare_slot, np.int32),
        query_start=np.arange(size + 1, dtype=np.int32),
        starts=np.full(size, longest - 1, np.int32),
        token_ids=np.zeros(size, np.int32),
        sampling_rows=np.arange(size, dtype=np.int32),
    )


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], _T]) -> tuple[Replay, _T]:
        """See ``Capture``. ``function`` runs once as it is before, so that its kernels are
        compiled."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of the driver meanwhile does not end the capture. And where it
        # fails, the library may leave its stream the current one.
        mode = "thread_local"
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode),
            ):
                left = function()
        except BaseException:
            self._give_up()
            raise
        return graph.replay, left

    def _give_up(self) -> None:
        """Tell the allocator that a capture which failed is over.

        torch 2.11 does not where the driver ends it with an error (pytorch/pytorch#180395): then
        all that was used on a second stream would be kept for good, as while a capture is under
        way, and ``empty_cache`` would fail.
        """
        with contextlib.suppress(RuntimeError):  # it knows
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self._pool)
