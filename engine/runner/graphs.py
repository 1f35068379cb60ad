"""Decode steps as CUDA graphs: one replay instead of hundreds of launches.

A step in which every row has one token is captured for a ladder of batch sizes, in two pieces:

    packed rows ─► [ inputs ─ attention plan ─ layers ─ logits ] ─► [ sample ─ feed back ]

The second piece is replayed if no row needs more than the parameter table holds; otherwise the
sampler runs on the logits without a graph. A batch between two sizes is padded with rows of a spare
slot that hold no token. Lengths, block tables and newest tokens live on the device, so the graph of
a size serves every batch within the bounds it was captured with.

Steps with prompts are captured by ``prompt_graphs.py``, as far as that pays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.lora.batch import CapturedAdapters, RecordedAdapters
from engine.lora.store import AdapterStore
from engine.models.decoder import Decoder
from engine.models.layer_state import LayerMemory
from engine.models.spec import DecoderSpec
from engine.models.step_state import Rotation, StepState
from engine.runner.captured_batches import decode_bounds, longest_row
from engine.runner.graph_ladder import GraphLadder, StepKind, first_line
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.runner.step_builder import StepBuilder
from engine.runner.step_peers import GraphKey, NotCapturedError, StepPeers, capturing
from engine.runner.transfer import Uploads
from engine.runner.trials import RecordedTrial
from engine.speculation.features import Features
from kernels.attention import AttentionSpec, BatchGeometry
from kernels.inputs import StepRows
from kernels.operations import Kernels
from kernels.sampling import SamplerOutput

_T = TypeVar("_T")
Replay = Callable[[], None]


class Capture(Protocol):
    """Records the kernel launches of functions."""

    def __call__(self, function: Callable[[], _T]) -> tuple[Replay, _T]:
        """Return a replay of what ``function`` launches, and the tensors it returned.

        Other replays may overwrite these tensors: read them on the same stream, before the next
        step's replay.
        """
        ...


class StepModel(Protocol):
    """What a decode step runs: a ``Decoder``, or a draft head in its place."""

    @property
    def spec(self) -> DecoderSpec:
        """Of the model."""
        ...

    def rotations(self, positions: torch.Tensor, /) -> tuple[Rotation, ...]:
        """See ``Decoder.rotations``."""
        ...

    def forward(
        self, input_ids: torch.Tensor, state: StepState, caches: Sequence[LayerMemory], /
    ) -> torch.Tensor:
        """See ``Decoder.forward``."""
        ...

    def raw_logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """See ``Decoder.raw_logits``."""
        ...


# Per size; the logits of larger sizes share one buffer.
_OWN_LOGITS_BYTES = 16 << 20


class GreedyStep(NamedTuple):
    """A whole step whose rows are all greedy; it does not write logits."""

    replay: Replay
    sampled: SamplerOutput  # [size]


class HeadFeatures(NamedTuple):
    """What a step leaves for a draft head; written to the head's table after the forward pass."""

    slots: torch.Tensor  # [size] int64
    features: torch.Tensor  # [size, hidden_size]


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured batch size."""

    packed: torch.Tensor  # [3 * size] int32: slots, starts, token ids; see ``padding_rows``
    bounds: BatchGeometry
    logits: torch.Tensor  # [size, vocab] float32, or the dtype that the head rounds to
    positions: torch.Tensor  # [size] int64, of the tokens to be sampled
    sampled: SamplerOutput  # [size]
    head_features: HeadFeatures | None  # for a draft head
    forward: Replay
    sample: Replay
    greedy: GreedyStep | None = None  # instead of both
    # Of its rows; None: they have none.
    adapters: RecordedAdapters | CapturedAdapters | None = None
    rotary_positions: torch.Tensor | None = None  # [size], see ``MRopePositions``; None: unused
    trial: RecordedTrial | None = None  # if it verifies drafts and the model is recurrent

    @property
    def size(self) -> int:
        """Number of rows, padding included."""
        return self.bounds.num_rows

    @property
    def key(self) -> GraphKey:
        """Names it on other ranks."""
        return GraphKey(self.size, adapted=self.adapters is not None)

    @property
    def slots(self) -> torch.Tensor:
        """[size] int32, of the last batch that was loaded."""
        return self.packed[: self.size]

    @property
    def token_ids(self) -> torch.Tensor:
        """[size] int32, of the last batch that was loaded."""
        return self.packed[2 * self.size : 3 * self.size]


class DecodeGraphs:
    """The captured batch sizes; see ``GraphLadder`` for when they are captured.

    Args:
        model, cache, kernels, spec, rows: the runner's.
        max_num_rows: the most rows of a step.
        capture: records what a step launches.
        features: those of the draft head, if there is one.
        adapters: the store of the rows' adapters; None: they have none.
        enable_feedback: sampled tokens become the rows' newest tokens.
        peers: the ranks with the other shards; None: the whole model is here.
        lead: how far behind the next position a sampled token is.
        num_drafts: the most drafts of a row.
    """

    def __init__(
        self,
        model: StepModel,
        cache: KVCache,
        kernels: Kernels,
        spec: AttentionSpec,
        rows: RowTable,
        max_num_rows: int,
        capture: Capture,
        features: Features | None = None,
        *,
        adapters: AdapterStore | None = None,
        enable_feedback: bool = True,
        peers: StepPeers | None = None,
        lead: int = 0,
        num_drafts: int = 0,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._spec = spec
        self._builder = StepBuilder(model.rotations, kernels, spec)
        self._rows = rows
        self._capture = capture
        self._peers = peers
        self._lead = lead
        self._num_drafts = num_drafts
        self._features = features
        self._enable_feedback = enable_feedback
        self._adapters = adapters
        self._uploads = Uploads(spec.device)  # of the rows' adapters
        sizes = capture_sizes(max_num_rows)
        self._ladder = GraphLadder(
            "decode steps",
            "rows",
            sizes,
            self._capture_kind,
            adapters,
            has_trials=num_drafts > 0 and model.spec.is_recurrent,
        )
        self._logits: torch.Tensor | None = None  # shared by the larger sizes

    def find(
        self, batch: HostBatch, *, has_drafts: bool = False, adapted: bool = False
    ) -> DecodeGraph | None:
        """Return the smallest graph that fits the batch, whether or not it verifies drafts.

        ``adapted``: some rows have adapters. None if running without a graph costs less.
        """
        if not batch.is_decode:
            return None
        num_rows, on_trial = batch.slots.size, has_drafts and self._model.spec.is_recurrent
        # Padding to twice the rows costs less than the launches, except for the largest models.
        most = 2 * num_rows + 8
        graph = self._ladder.find(num_rows, most, adapted=adapted, on_trial=on_trial)
        if graph is None:
            return None
        known = batch.query_start, batch.seq_lens, batch.slots, self._rows.host_tables
        actual = BatchGeometry(*known, graph.bounds.device)
        fits = self._kernels.attention.can_replay(graph.bounds, actual, self._spec)
        return graph if fits else None

    def load(self, graph: DecodeGraph, batch: HostBatch, uploads: Uploads) -> None:
        """Copy a batch, padded, and the changes of the row table to the graph's inputs."""
        changes = self._rows.changes()
        if any(array.size for array in changes):  # in about one step of sixteen
            self._rows.write(*uploads.send(changes))
        count = batch.slots.size
        columns = np.zeros((3 if self._rows.mrope is None else 4, graph.size), np.int32)
        slots, starts, token_ids, *turns = columns
        slots[:count], slots[count:] = batch.slots, self._rows.padding_slot
        starts[:count], starts[count:] = batch.starts, -1
        token_ids[:count] = batch.token_ids
        if self._rows.mrope is not None:
            turns[0][:] = starts + self._rows.mrope.deltas[slots]
        uploads.fill(graph.packed, [columns])

    def capture_next(self) -> bool:
        """See ``GraphLadder.capture_next``."""
        return self._ladder.capture_next()

    def _capture_kind(self, kind: StepKind) -> DecodeGraph:
        size, device, table = kind.size, self._spec.device, self._rows
        adapters: CapturedAdapters | None = None
        if kind.adapted:
            assert self._adapters is not None
            do = self._kernels.operations
            adapters = CapturedAdapters(self._adapters, size, None, do, self._uploads)
        trial = RecordedTrial(size, device, self._num_drafts) if kind.on_trial else None
        num_columns = 3 if table.mrope is None else 4
        packed, rows = padding_rows(size, table.padding_slot, device, num_columns)
        turns = None if table.mrope is None else packed[3 * size :]
        longest = longest_row(size, self._cache, table, self._spec)
        batch = decode_bounds(size, longest, table.padding_slot)
        # Read after the next step has begun, so it must not be where other replays write.
        sampled = SamplerOutput.empty(size, device)

        def forward() -> tuple[BatchGeometry, torch.Tensor, torch.Tensor, HeadFeatures | None]:
            built = self._builder.build(batch, rows, table, rotary_positions=turns)
            inputs, bounds, state = built
            if adapters is not None:
                state = adapters.applied(state)
            if trial is not None:
                state = replace(state, rows=trial.rows, trial=trial.begin_layers())
            given = inputs.input_ids, state, self._cache.layers
            kept = None
            if self._features is None:
                hidden = self._model.forward(*given)
            else:
                assert isinstance(self._model, Decoder)
                hidden, features = self._features.run(self._model, *given)
                kept = HeadFeatures(inputs.slot_mapping, features)
            logits = self._persist_logits(self._model.raw_logits(hidden))
            positions = inputs.next_positions + self._lead if self._lead else inputs.next_positions
            return bounds, logits, positions, kept

        with capturing(self._peers, GraphKey(size, adapted=kind.adapted)):
            replay_forward, (bounds, logits, positions, kept) = self._capture(forward)

        def sample() -> None:
            do, parameters = self._kernels.operations, table.sampling.table
            do.sample(logits, rows.slots, positions, parameters, None, None, None, sampled)
            if self._enable_feedback:
                do.feed_back(table.newest, rows.slots, sampled.token_ids, parameters.count_line)

        replay_sample, _ = self._capture(sample)
        if trial is not None:
            trial.replay_commit(self._capture(trial.commit)[0])
        return DecodeGraph(
            packed=packed,
            bounds=bounds,
            logits=logits,
            positions=positions,
            sampled=sampled,
            head_features=kept,
            forward=replay_forward,
            sample=replay_sample,
            adapters=adapters,
            rotary_positions=turns,
            trial=trial,
        )

    def _persist_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return where a step's logits stay until its tokens are sampled.

        Logits small enough for a buffer of their own at each size stay in place.
        """
        if logits.nbytes <= _OWN_LOGITS_BYTES:
            return logits
        held = self._logits
        if held is None or held.dtype != logits.dtype or len(held) < len(logits):
            held = self._logits = torch.empty_like(logits)
        return held[: len(logits)].copy_(logits)


def capture_sizes(max_num_rows: int) -> list[int]:
    """Return the sizes to capture: 1, 2, 4, then multiples of 8 up to the maximum."""
    sizes = [1, 2, 4, *range(8, max_num_rows, 8)]
    return [size for size in sizes if size < max_num_rows] + [max_num_rows]


def padding_rows(
    size: int, padding_slot: int, device: torch.device, num_columns: int = 3
) -> tuple[torch.Tensor, StepRows]:
    """Return the packed rows that a captured step reads, filled with padding, and views of them.

    [num_columns * size] int32: slots, starts, token ids, and what the caller adds.
    """
    steps = torch.arange(size + 1, dtype=torch.int32, device=device)
    packed = torch.zeros(num_columns * size, dtype=torch.int32, device=device)
    packed[:size] = padding_slot
    packed[size : 2 * size] = -1
    slots, starts, token_ids, *_ = packed.split(size)
    return packed, StepRows(slots, steps, starts, token_ids)


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], _T]) -> tuple[Replay, _T]:
        """See ``Capture``. ``function`` first runs once uncaptured, to compile its kernels.

        Raises:
            NotCapturedError: the capture failed.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                function()
        finally:  # it may still read what the caller then frees
            torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Driver calls of other threads must not invalidate the capture. If a capture fails, torch
        # may leave its stream as the current one.
        mode = "thread_local"
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode),
            ):
                left = function()
        except BaseException as error:
            self._end_pool_allocation()
            if isinstance(error, Exception):
                raise NotCapturedError(first_line(error)) from error
            raise
        return graph.replay, left

    def _end_pool_allocation(self) -> None:
        """Tell the allocator that a failed capture is over.

        torch 2.11 does not do so if the driver ends the capture with an error
        (pytorch/pytorch#180395): all memory used on a second stream would then be kept for good, as
        during a capture, and ``empty_cache`` would fail.
        """
        with contextlib.suppress(RuntimeError):  # it knows already
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self._pool)
