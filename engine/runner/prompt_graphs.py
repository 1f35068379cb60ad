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

from dataclasses import dataclass

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.limits import MAX_CAPTURED_TOKENS
from engine.lora.batch import CapturedAdapters
from engine.lora.store import AdapterStore
from engine.models.decoder import Decoder
from engine.models.loader import num_parameters
from engine.models.spec import DecoderSpec
from engine.runner.captured_batches import longest_row, pad_prompt, padded_rows, prompt_bounds
from engine.runner.graph_ladder import GraphLadder, StepKind
from engine.runner.graphs import Capture, HeadFeatures, Replay
from engine.runner.inputs import DeviceBatch, HostBatch
from engine.runner.mrope import MRopePositions
from engine.runner.rows import RowTable
from engine.runner.step_builder import BuiltStep, StepBuilder
from engine.runner.step_peers import GraphKey, StepPeers, capturing
from engine.runner.transfer import Uploads
from engine.speculation.features import Features
from kernels.attention import AttentionSpec, BatchGeometry
from kernels.inputs import StepRows
from kernels.operations import Kernels

# Tokens.
_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, MAX_CAPTURED_TOKENS)
# Up to here reading the weights takes longest, so that padding costs nothing.
_ALWAYS_CAPTURED = 64
# Of a layer: the host of an H200 took 10 to 15 ms for a step of 28 layers.
_LAUNCH_S = 400e-6
_FLOPS_PER_S = 400e12  # of an H200, in products of some hundred rows
# Products of weights in codes take up to three launches, and in float8 half of the time.
_LAUNCHES_OF_CODES = 2


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A captured number of tokens."""

    packed: torch.Tensor  # int32, all that the host sends, of which these are slices
    rows: StepRows  # the last row holds the padding
    sampling_rows: torch.Tensor  # [rows] int32
    step: BuiltStep
    hidden: torch.Tensor  # [rows, hidden_size], of each row's last token
    head_features: HeadFeatures | None  # of all tokens, for a draft head
    forward: Replay
    adapters: CapturedAdapters | None = None  # of its rows; None: they have none

    @property
    def num_rows(self) -> int:
        """Number of rows, the padding included."""
        return self.step.geometry.num_rows

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.rows.token_ids.shape[0]

    @property
    def key(self) -> GraphKey:
        """Names it on other ranks."""
        return GraphKey(self.num_rows, self.num_tokens, self.adapters is not None)


class PromptGraphs:
    """The captured numbers of tokens; see ``GraphLadder`` for when they are captured.

    Args:
        model, cache, kernels, spec, rows: the runner's, if ``can_capture`` says so.
        max_num_rows: the most rows of a step.
        max_num_tokens: the most tokens of a step.
        capture: records what a step launches.
        features: those of the draft head, if there is one.
        has_codes: weights are quantised.
        adapters: the store of the rows' adapters; None: they have none.
        peers: the ranks with the other shards; None: the whole model is here.
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
        features: Features | None = None,
        *,
        has_codes: bool = False,
        adapters: AdapterStore | None = None,
        peers: StepPeers | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._spec = spec
        self._builder = StepBuilder(model.rotations, kernels, spec)
        self._rows = rows
        self._max_num_rows = max_num_rows
        self._capture = capture
        self._features = features
        self._peers = peers
        self._adapters = adapters
        self._uploads = Uploads(spec.device)  # of the rows' adapters
        sizes = prompt_sizes(model.spec, max_num_tokens, has_codes=has_codes)
        self._ladder = GraphLadder(
            "steps with prompts", "tokens", sizes, self._capture_kind, adapters
        )

    def load(
        self, batch: HostBatch, adapted: np.ndarray | None, uploads: Uploads
    ) -> tuple[PromptGraph, DeviceBatch] | None:
        """Copy a step to the inputs of the smallest graph that fits it, with the table's changes.

        The step has no tokens of images.

        Args:
            batch: the step.
            adapted: the slots of its rows' adapters, from ``adapter_slots``.
            uploads: to the device.

        Returns:
            The graph, and the step as it lies in its inputs; None if no graph fits.
        """
        count = batch.token_ids.size
        # While the larger sizes alone are captured, padding might cost more than launching.
        graph = self._ladder.find(count, 2 * count + 16, adapted=adapted is not None)
        if graph is None or batch.slots.size >= graph.num_rows:
            return None
        table = self._rows
        padded = pad_prompt(batch, graph.num_rows, graph.num_tokens, table.padding_slot)
        known = padded.query_start, padded.seq_lens, padded.slots, table.host_tables
        actual = BatchGeometry(*known, graph.step.geometry.device)
        if not self._kernels.attention.can_replay(graph.step.geometry, actual, self._spec):
            return None
        changes = table.changes()
        if any(array.size for array in changes):
            table.write(*uploads.send(changes))
        arrays = [padded.slots, padded.query_start, padded.starts, padded.token_ids]
        arrays.append(np.resize(batch.sampling_rows, graph.num_rows))
        if table.mrope is not None:
            arrays.append(_rotary_positions(batch, padded, table.mrope))
        uploads.fill(graph.packed, arrays)
        if graph.adapters is not None and adapted is not None:
            graph.adapters.set(adapted, np.diff(batch.query_start))
        nothing = graph.packed[:0]
        sampling_rows = graph.sampling_rows[: batch.sampling_rows.size]
        return graph, DeviceBatch(graph.rows, sampling_rows, nothing, nothing)

    def capture_next(self) -> bool:
        """See ``GraphLadder.capture_next``."""
        return self._ladder.capture_next()

    def _capture_kind(self, kind: StepKind) -> PromptGraph:
        size, device, table = kind.size, self._spec.device, self._rows
        num_rows = padded_rows(size, self._max_num_rows)
        packed, rows, sampling_rows, turns = _packed(size, num_rows, table, device)
        num_slots = num_rows * longest_row(num_rows, self._cache, table, self._spec)
        batch = prompt_bounds(size, num_rows, num_slots, table.padding_slot)
        adapters: CapturedAdapters | None = None
        if kind.adapted:
            assert self._adapters is not None
            do = self._kernels.operations
            adapters = CapturedAdapters(self._adapters, num_rows, size, do, self._uploads)

        def forward() -> tuple[BuiltStep, torch.Tensor, HeadFeatures | None]:
            turning = turns if turns.numel() else None
            built = self._builder.build(batch, rows, table, rotary_positions=turning)
            last_tokens = rows.query_start[1:] - 1  # a row without any has those of the one before
            state = built.state if adapters is None else adapters.applied(built.state)
            given = built.inputs.input_ids, state, self._cache.layers
            if self._features is None:
                return built, self._model.forward(*given, last_tokens), None
            hidden, features = self._features.run(self._model, *given)
            kept = HeadFeatures(built.inputs.slot_mapping, features)
            return built, hidden.index_select(0, last_tokens), kept

        with capturing(self._peers, GraphKey(num_rows, size, kind.adapted)):
            replay, left = self._capture(forward)
        return PromptGraph(packed, rows, sampling_rows, *left, replay, adapters)


def can_capture(spec: AttentionSpec) -> bool:
    """Return whether steps with prompts can be captured: nothing of them is planned on the host."""
    is_planned = spec.chunk_size is not None or spec.selection is not None
    return not (is_planned or spec.source is not None)


def prompt_sizes(spec: DecoderSpec, max_num_tokens: int, *, has_codes: bool = False) -> list[int]:
    """Return the numbers of tokens to capture, ascending: as long as launching takes longer."""
    share = 1.0 if spec.moe is None else spec.moe.top_k / spec.moe.num_experts
    flops_per_token = 2.0 * num_parameters(spec) * share
    limit = spec.num_layers * _LAUNCH_S * _FLOPS_PER_S / flops_per_token
    limit *= _LAUNCHES_OF_CODES if has_codes else 1
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


def _rotary_positions(batch: HostBatch, padded: HostBatch, mrope: MRopePositions) -> np.ndarray:
    """[size] int32, of a step without images, padded."""
    found = padded.positions
    found[: batch.token_ids.size] = mrope.of_text(batch)
    return found
