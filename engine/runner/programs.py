"""Decode steps as recorded programs on a CPU: one native call instead of dozens from Python.

    rows ─► [ inputs ─ layers ─┬─ logits ] ─► [ sample ─ feed back ]
                               └─ likeliest ─ feed back ]

As on a GPU (``engine/runner/graphs.py``), a step in which every row has one token is captured in
two pieces, the second for rows that need no more than the parameter table holds. If all rows are
greedy, one program is the whole step: it finds the largest logits without storing all of them.

Recording computes nothing and takes some milliseconds, so each number of rows is recorded when it
first occurs, and none is padded. Steps that verify drafts have many different numbers of rows; one
of these is recorded only after it has occurred a few times. Steps whose rows have adapters have
programs of their own, which are given each row's adapter before a run.

Only native calls, sums and products can be recorded; a step with anything else, such as matrix
products in float32, is computed without a program.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.lora.batch import RecordedAdapters
from engine.lora.store import AdapterStore
from engine.models.decoder import Decoder
from engine.runner.captured_batches import decode_bounds
from engine.runner.graph_ladder import StepKind
from engine.runner.graphs import DecodeGraph, GreedyStep, HeadFeatures, padding_rows
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.runner.step_builder import StepBuilder
from engine.runner.transfer import Uploads
from engine.runner.trials import RecordedTrial
from engine.speculation.features import Features
from kernels.attention import AttentionSpec, BatchGeometry
from kernels.cpu.program import NotRecordableError, Program, Recorder, Workspace
from kernels.inputs import StepRows
from kernels.operations import Kernels
from kernels.sampling import SamplerOutput

logger = logging.getLogger(__name__)

# Occurrences of a number of rows with drafts after which recording it pays off.
_MIN_OCCURRENCES = 8


class PrefillProgram(NamedTuple):
    """A program that stores the keys and values of a number of tokens and samples nothing."""

    packed: torch.Tensor  # [3 * size] int32: slots, positions, token ids
    bounds: BatchGeometry
    forward: Program


class DecodePrograms:
    """The programs recorded so far, one for each kind of step.

    Args:
        model, cache, kernels, spec, rows: the runner's, on a CPU.
        adapters: the store of the rows' adapters; None: they have none.
        enable_feedback: sampled tokens become the rows' newest tokens.
        features: those of the draft head, if there is one.
        num_drafts: the most drafts of a row.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        kernels: Kernels,
        spec: AttentionSpec,
        rows: RowTable,
        *,
        adapters: AdapterStore | None = None,
        enable_feedback: bool = True,
        features: Features | None = None,
        num_drafts: int = 0,
    ) -> None:
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._spec = spec
        self._builder = StepBuilder(model.rotations, kernels, spec)
        self._rows = rows
        self._adapters = adapters
        self._adapted_version = -1  # the store's version at recording time
        self._enable_feedback = enable_feedback
        self._features = features
        self._num_drafts = num_drafts
        self._workspace = Workspace()
        self._programs: dict[StepKind, DecodeGraph] = {}
        self._prefill_programs: dict[int, PrefillProgram] = {}
        self._num_seen: Counter[StepKind] = Counter()  # unrecorded steps with drafts
        self._unrecordable: set[bool] = set()  # steps without or with adapters

    def find(
        self, batch: HostBatch, *, has_drafts: bool = False, adapted: bool = False
    ) -> DecodeGraph | None:
        """Return the program for the batch's number of rows, recorded if need be.

        ``adapted``: some rows have adapters. None if the step cannot be recorded, or if it verifies
        drafts and its number of rows is rare.
        """
        if not batch.is_decode or adapted in self._unrecordable:
            return None
        if adapted:
            self._drop_stale()
        kind = StepKind(batch.slots.size, adapted, has_drafts and self._model.spec.is_recurrent)
        if has_drafts and kind not in self._programs:
            self._num_seen[kind] += 1
            if self._num_seen[kind] < _MIN_OCCURRENCES:
                return None
        return self._of_kind(kind)

    def of_size(self, size: int) -> DecodeGraph | None:
        """Return the program for ``size`` rows without adapters, recorded if need be; None if
        none."""
        return self._of_kind(StepKind(size, adapted=False))

    def _of_kind(self, kind: StepKind) -> DecodeGraph | None:
        found = self._programs.get(kind)
        if found is None and kind.adapted not in self._unrecordable:
            try:
                found = self._programs[kind] = self._record(kind)
            except (NotRecordableError, OSError) as error:  # OSError: out of memory
                self._unrecordable.add(kind.adapted)
                which = "decode steps with adapters" if kind.adapted else "decode steps"
                logger.info("%s are not recorded: %s", which, error)
        return found

    def _drop_stale(self) -> None:
        """Drop the programs with adapters if the adapters have moved in memory."""
        assert self._adapters is not None
        if self._adapters.version != self._adapted_version:
            self._adapted_version = self._adapters.version
            for kind in [kind for kind in self._programs if kind.adapted]:
                del self._programs[kind]

    def prefill_program(self, size: int) -> PrefillProgram:
        """Return the program that prefills ``size`` tokens, recorded if need be.

        It exists wherever decode programs do. Consecutive tokens of one sequence may be rows of the
        same run: each layer stores all keys and values before it reads any.
        """
        found = self._prefill_programs.get(size)
        if found is None:
            packed, rows = padding_rows(size, self._rows.padding_slot, self._spec.device)
            record = Recorder(self._workspace)
            forward, (where, *_) = record(partial(self._forward, size, rows))
            found = self._prefill_programs[size] = PrefillProgram(packed, where, forward)
        return found

    def load(self, graph: DecodeGraph, batch: HostBatch, uploads: Uploads) -> None:
        """Copy a batch to where the program reads it; the row table is shared memory."""
        self._rows.changes()
        np.concatenate((batch.slots, batch.starts, batch.token_ids), out=graph.packed.numpy())
        np.add(batch.starts, 1, out=graph.positions.numpy())
        if graph.rotary_positions is not None and self._rows.mrope is not None:
            ahead = self._rows.mrope.deltas[batch.slots]
            np.add(batch.starts, ahead, out=graph.rotary_positions.numpy())

    def capture_next(self) -> bool:
        """Return False: programs are recorded when they are needed."""
        return False

    def _record(self, kind: StepKind) -> DecodeGraph:
        size, adapters = kind.size, None
        if kind.adapted:
            assert self._adapters is not None
            adapters = RecordedAdapters(self._adapters, size, self._kernels.operations)
        packed, rows = padding_rows(size, self._rows.padding_slot, self._spec.device)
        positions = torch.zeros(size, dtype=torch.int64)  # of the tokens to be sampled
        turns = None if self._rows.mrope is None else torch.zeros(size, dtype=torch.int64)
        record = Recorder(self._workspace)
        trial: RecordedTrial | None = None
        if kind.on_trial:
            trial = RecordedTrial(size, self._spec.device, self._num_drafts)
        run = partial(self._forward, size, rows, adapters, turns, trial)
        layers, (where, hidden, kept) = record(run)
        head, logits = record(partial(self._model.logits, hidden))
        sample, sampled = record(partial(self._sample, logits, rows.slots, positions))
        choose, likeliest = record(partial(self._likeliest, hidden, rows.slots))
        if trial is not None:
            trial.replay_commit(record(trial.commit)[0])
        return DecodeGraph(
            packed=packed,
            bounds=where,
            logits=logits,
            positions=positions,
            sampled=sampled,
            head_features=kept,
            forward=layers + head,
            sample=sample,
            greedy=None if likeliest is None else GreedyStep(layers + choose, likeliest),
            adapters=adapters,
            rotary_positions=turns,
            trial=trial,
        )

    def _forward(
        self,
        size: int,
        rows: StepRows,
        adapters: RecordedAdapters | None = None,
        turns: torch.Tensor | None = None,
        trial: RecordedTrial | None = None,
    ) -> tuple[BatchGeometry, torch.Tensor, HeadFeatures | None]:
        """Record the layers: the rows' layout, their hidden states, and what a draft head needs."""
        table = self._rows
        longest = table.host_tables.shape[1] * self._spec.block_size
        batch = decode_bounds(size, longest, table.padding_slot)
        built = self._builder.build(batch, rows, table, rotary_positions=turns)
        inputs, where, state = built
        state = replace(state, adapters=adapters, output_adapters=adapters)
        if trial is not None:
            state = replace(state, rows=trial.rows, trial=trial.begin_layers())
        given = inputs.input_ids, state, self._cache.layers
        if self._features is None:
            return where, self._model.forward(*given), None
        hidden, features = self._features.run(self._model, *given)
        return where, hidden, HeadFeatures(inputs.slot_mapping, features)

    def _sample(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> SamplerOutput:
        parameters = self._rows.sampling.table
        chosen = self._kernels.operations.sample(logits, slots, positions, parameters)
        self._feed_back(chosen, slots)
        return chosen

    def _likeliest(self, hidden: torch.Tensor, slots: torch.Tensor) -> SamplerOutput | None:
        chosen = self._model.sample_greedy(hidden)
        if chosen is not None:
            self._feed_back(chosen, slots)
        return chosen

    def _feed_back(self, chosen: SamplerOutput, slots: torch.Tensor) -> None:
        if self._enable_feedback:
            lines = self._rows.sampling.table.count_line
            self._kernels.operations.feed_back(self._rows.newest, slots, chosen.token_ids, lines)
