"""Runs plans on a loaded model (see ``engine/runner/protocol.py`` for the contract).

    plan ─► rows, on the host ─► one transfer ─► inputs ─► layers ─► logits ─► sample ─► feed back
                                                                                 └─► one fetch

Nothing between the transfer and the fetch waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.lora.batch import adapter_slots, step_adapters
from engine.lora.store import AdapterStore
from engine.models.decoder import Decoder, StepState
from engine.plan_rows import PlanRows
from engine.profiler import Spans
from engine.runner.device import StepThreads
from engine.runner.device_errors import translated_errors
from engine.runner.drafts import Guesses, StepDrafts, spread, step_drafts
from engine.runner.graphs import DecodeGraph, DecodeGraphs
from engine.runner.host_blocks import HostBlocks
from engine.runner.inputs import (
    DeviceBatch,
    HostBatch,
    build,
    extend_tables,
    geometry,
    host_batch,
    send,
)
from engine.runner.outcome import JudgedRow, Outcome, SampledRows
from engine.runner.passes import PassesOutcome, later_passes
from engine.runner.pooling import PooledRow, pool_rows
from engine.runner.programs import DecodePrograms
from engine.runner.protocol import Computed, Launched, Resting
from engine.runner.rehearsals import Rehearsals
from engine.runner.rows import RowTable
from engine.runner.sampling import Sampler, StepMasks
from engine.runner.transfer import Downloads, Uploads
from engine.sampling.logprobs import logprob_columns
from engine.speculation.draft_model import DraftModel
from engine.speculation.features import Features
from engine.types import Adapter, BlockCopy, EngineInfo, StepPlan, StepResult
from kernels.attention import AttentionSpec
from kernels.inputs import StepInputs
from kernels.operations import Kernels
from kernels.sending import to_device

if TYPE_CHECKING:
    from engine.parallel.leader import Team

# Prompt positions whose logits are made at once: a long chunk's would take gigabytes.
_PROMPT_LOGPROB_ROWS = 128


class _Inputs(NamedTuple):
    """A step on the device."""

    sent: DeviceBatch
    step: StepInputs
    state: StepState


class _Ready(NamedTuple):
    """A batch where it is computed: in a captured graph, or on the device."""

    graph: DecodeGraph | None
    inputs: _Inputs | None  # where there is no graph
    drafts: StepDrafts | None
    masks: StepMasks | None


class _Told(NamedTuple):
    """What a step tells of prompts."""

    judged: list[JudgedRow]
    pooled: list[PooledRow]


class ModelRunner:
    """A model, its KV cache and the rows it has been told of. All calls from one thread.

    Args:
        info: what was loaded.
        model: the decoder.
        cache: its keys and values.
        kernels: those the decoder was made with.
        attention_spec: what the kernels were chosen for.
        rows: empty.
        adapters: empty too.
        graphs: of decode steps, or programs of them; None where the kernels cannot be captured.
        draft: guesses the tokens of rows that ask for it; None: no row does.
        threads: how many compute a step; None: those that are set.
        features: what it reads of the model, where it is a head.
        rejects: judge drafts of sampled texts by rejection.
        rehearsals: what is run behind the first answers.
        team: the ranks that have the rest of the model; None: it is all here.
        host: blocks in the host's memory; None: none are there.
        rest: what the runner leaves behind when it ends, by the level of rest.
    """

    def __init__(
        self,
        info: EngineInfo,
        model: Decoder,
        cache: KVCache,
        kernels: Kernels,
        attention_spec: AttentionSpec,
        rows: RowTable,
        adapters: AdapterStore,
        graphs: DecodeGraphs | DecodePrograms | None = None,
        draft: DraftModel | None = None,
        *,
        threads: StepThreads | None = None,
        features: Features | None = None,
        rejects: bool = False,
        rehearsals: Rehearsals,
        team: Team | None = None,
        host: HostBlocks | None = None,
        rest: Callable[[int], Resting],
    ) -> None:
        self._info = info
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._spec = attention_spec
        self._rows = rows
        self._adapters = adapters
        self._graphs = graphs
        self._draft = draft
        self._threads = threads
        self._features = features
        self._rehearsals = rehearsals
        self._team = team
        self._host = host
        self._rest = rest
        uploads = Uploads(attention_spec.device)
        self._sampler = Sampler(kernels.operations, rows, uploads, rejects=rejects)
        self._uploads = Uploads(attention_spec.device)
        self._is_cpu = attention_spec.device.type == "cpu"
        self._downloads = Downloads(attention_spec.device)
        self._spans = Spans()

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step. Raises as ``Launched.result`` says."""
        with translated_errors(), torch.inference_mode():
            outcome = self._launch(plan)
        return Computed(StepResult()) if outcome is None else _OnTheWay(outcome)

    def mark(self, spans: Spans) -> None:
        """See ``Runner.mark``."""
        self._spans = spans

    def load_adapter(self, adapter: Adapter) -> None:
        """See ``Runner.load_adapter``."""
        self._adapters.load(adapter)
        if self._team is not None:
            self._team.load_adapter(adapter)

    def on_loss(self, act: Callable[[str], None]) -> None:
        """Have ``act`` called, in a thread of its own, when a part of the model is lost."""
        if self._team is not None:
            self._team.on_loss(act)

    def prepare(self) -> bool:
        """Capture a graph, if there is one to be captured; see ``Runner.prepare``."""
        with translated_errors(), torch.inference_mode():
            if self._graphs is not None and self._graphs.capture_next():
                return True
            if self._draft is not None and self._draft.capture_next():
                return True
            return self._rehearsals.run_next()

    def rest(self, level: int) -> Resting:
        """See ``Runner.rest``."""
        return self._rest(level)

    def _launch(self, plan: StepPlan) -> Outcome | PassesOutcome | None:
        with self._spans("inputs"):
            self._update_rows(plan)
            if self._host is not None:
                self._host.exchange(plan)
            if not plan.rows:
                return None
            if self._threads is not None:
                self._threads.use(len(plan.rows))
            extend_tables(plan.rows, self._rows)
            rows, guesses = self._guess(plan)
            drafts = step_drafts(rows, guesses)
            if drafts is not None:
                rows = spread(rows)
            batch = host_batch(rows, self._rows)
            ready = self._load(batch, plan.copies, drafts)
        sampled, told = self._run(rows, batch, ready)
        first = Outcome(rows, batch.sampling_rows, sampled, *told, self._downloads, drafts)
        if not rows.num_passes or not self._sampler.is_plain(batch):
            return first
        passes = [first]
        for places, later in later_passes(batch, rows.num_passes):
            with self._spans("inputs"):
                ready = self._load(later)
            sampled, told = self._run(rows, later, ready)
            passes.append(Outcome(rows, places, sampled, *told, self._downloads))
        return PassesOutcome(passes)

    def _load(
        self,
        batch: HostBatch,
        copies: tuple[BlockCopy, ...] = (),
        drafts: StepDrafts | None = None,
    ) -> _Ready:
        """Bring a batch to where it is computed."""
        adapted = adapter_slots(self._adapters, batch, self._rows)
        graph = self._load_graph(batch, copies, adapted, drafts)
        inputs = self._send(batch, copies, adapted, drafts) if graph is None else None
        masks = self._sampler.masks(batch) if self._is_cpu and drafts is None else None
        return _Ready(graph, inputs, drafts, masks)

    def _run(
        self, rows: PlanRows, batch: HostBatch, ready: _Ready
    ) -> tuple[SampledRows | None, _Told]:
        """Compute a batch that has been loaded."""
        graph, inputs, drafts, masks = ready
        if graph is not None:
            return self._replay(graph, batch, drafts, masks), _Told([], [])
        assert inputs is not None
        return self._compute(rows, batch, inputs, drafts, masks)

    def _guess(self, plan: StepPlan) -> tuple[PlanRows, Guesses | None]:
        """The plan's rows, and guesses where they ask for them; see ``DraftModel.guess``."""
        if self._draft is None:
            return plan.rows, None
        with self._spans("draft"):
            return self._draft.guess(plan)

    def _update_rows(self, plan: StepPlan) -> None:
        if self._draft is not None:
            self._draft.forget(plan.removed)
        for row_id in plan.removed:
            self._rows.remove(row_id)
        for added in plan.added:
            self._rows.add(added)

    def _load_graph(
        self,
        batch: HostBatch,
        copies: tuple[BlockCopy, ...],
        adapted: np.ndarray | None,
        drafts: StepDrafts | None,
    ) -> DecodeGraph | None:
        """The captured graph that serves the step, with the batch in it; None: there is none.

        ``adapted`` is what ``adapter_slots`` tells of the batch.
        """
        if self._graphs is None or copies or self._judges(batch):
            return None
        verifies = drafts is not None
        graph = self._graphs.find(batch, verifies=verifies, adapted=adapted is not None)
        if graph is not None:
            self._graphs.load(graph, batch, self._uploads)
            if drafts is not None:
                drafts.fill_inputs(graph.token_ids, batch)
            if graph.adapters is not None and adapted is not None:
                graph.adapters.set(adapted)
        return graph

    def _replay(
        self,
        graph: DecodeGraph,
        batch: HostBatch,
        drafts: StepDrafts | None,
        masks: StepMasks | None,
    ) -> SampledRows:
        is_plain = drafts is None and self._sampler.is_plain(batch)
        if is_plain and graph.greedy is not None and self._sampler.is_greedy(batch):
            with self._spans("forward"):
                graph.greedy.replay()
                self._keep(graph, batch)
            return SampledRows(graph.greedy.sampled)
        with self._spans("forward"):
            graph.forward()
            self._keep(graph, batch)
        with self._spans("sample"):
            if is_plain:
                self._downloads.guard()  # the last step's tokens lie where this one's will
                graph.sample()
                return SampledRows(graph.sampled)
            count = batch.slots.size
            logits, positions = graph.logits[:count], graph.positions[:count]
            slots = graph.slots[:count]
            return self._sampler.sample(logits, batch, slots, positions, drafts, masks)

    def _keep(self, graph: DecodeGraph, batch: HostBatch) -> None:
        """What a step has left for a head that drafts, without the rows that pad it."""
        if self._features is not None and graph.kept is not None:
            slots, features = graph.kept
            count = batch.slots.size
            self._features.keep(slots[:count], features[:count])

    def _send(
        self,
        batch: HostBatch,
        copies: tuple[BlockCopy, ...],
        adapted: np.ndarray | None,
        drafts: StepDrafts | None,
    ) -> _Inputs:
        """Bring the step to the device, and prepare there what the layers read."""
        operations, spec, table = self._kernels.operations, self._spec, self._rows
        sent = send(batch, copies, table, self._uploads)
        if drafts is not None:
            drafts.fill_inputs(sent.rows.token_ids, batch)
        if copies:
            if self._team is not None:
                self._team.copy(copies)
            sources, targets = sent.copy_sources.long(), sent.copy_targets.long()
            for layer in self._cache.layers:
                operations.copy_blocks(layer, sources, targets)
        inputs = build(batch, sent.rows, table, spec.block_size, operations)
        where = geometry(batch, sent.rows, inputs.seq_lens, table)
        state = StepState(
            attention=self._kernels.attention.plan(where, spec),
            slot_mapping=inputs.slot_mapping,
            positions=inputs.positions,
            rotations=self._model.rotations(inputs.positions),
        )
        if adapted is not None:
            of_tokens, of_wanted = step_adapters(self._adapters, adapted, batch, operations)
            state = replace(state, adapters=of_tokens, wanted_adapters=of_wanted)
        return _Inputs(sent, inputs, state)

    def _compute(
        self,
        rows: PlanRows,
        batch: HostBatch,
        inputs: _Inputs,
        drafts: StepDrafts | None,
        masks: StepMasks | None,
    ) -> tuple[SampledRows | None, _Told]:
        """From the inputs to the tokens."""
        sent = inputs.sent
        with self._spans("forward"):
            hidden, told = self._forward(rows, batch, inputs)
            if not batch.sampling_rows.size:
                return None, told
            logits = self._model.logits(hidden)
        with self._spans("sample"):
            slots = sent.rows.slots.index_select(0, sent.sampling_rows)
            positions = inputs.step.seq_lens.index_select(0, sent.sampling_rows).long()
            return self._sampler.sample(logits, batch, slots, positions, drafts, masks), told

    def _forward(
        self, rows: PlanRows, batch: HostBatch, inputs: _Inputs
    ) -> tuple[torch.Tensor, _Told]:
        """Hidden states of the sampling rows' last tokens, [S, hidden_size]; told of prompts."""
        judges, pools = self._judges(batch), self._pools(batch)
        # The hidden states of all tokens.
        wants_all = judges or pools or self._features is not None
        trims = not wants_all and not batch.is_decode
        wanted = _last_tokens(inputs.sent) if trims else None
        step, layers = inputs.step, self._cache.layers
        if self._team is not None:
            with self._team.forward(batch, self._rows, trims=trims):
                hidden = self._model.forward(step.input_ids, inputs.state, layers, wanted)
        elif self._features is None:
            hidden = self._model.forward(step.input_ids, inputs.state, layers, wanted)
        else:
            hidden, features = self._features.run(self._model, step.input_ids, inputs.state, layers)
            self._features.keep(step.slot_mapping, features)
        if not wants_all:
            return hidden, _Told([], [])
        judged = self._judge(rows, batch, hidden) if judges else []
        pooled = self._pool(rows, batch, hidden) if pools else []
        return hidden.index_select(0, _last_tokens(inputs.sent)), _Told(judged, pooled)

    def _pools(self, batch: HostBatch) -> bool:
        """Whether a row adds to a vector."""
        pooled = self._rows.pooled
        return bool(pooled) and not pooled.isdisjoint(batch.slots.tolist())

    def _pool(self, rows: PlanRows, batch: HostBatch, hidden: torch.Tensor) -> list[PooledRow]:
        requests = [self._rows.requests[slot] for slot in batch.slots.tolist()]
        bounds = batch.query_start.tolist()
        return list(pool_rows(rows, requests, bounds, hidden, self._model.logits))

    def _judges(self, batch: HostBatch) -> bool:
        """Whether a row tells of prompt tokens with this step."""
        judged = self._rows.judged
        if not judged:
            return False
        starts = dict(zip(batch.slots.tolist(), batch.starts.tolist(), strict=True))
        lengths = {slot: len(self._rows.requests[slot].prompt_token_ids) for slot in judged}
        return any(starts.get(slot, length) < length - 1 for slot, length in lengths.items())

    def _judge(self, rows: PlanRows, batch: HostBatch, hidden: torch.Tensor) -> list[JudgedRow]:
        """Log-probabilities of prompt tokens, for the rows that asked."""
        judged: list[JudgedRow] = []
        for index, (row, slot) in enumerate(zip(rows, batch.slots.tolist(), strict=True)):
            request = self._rows.requests[slot]
            num_top = request.sampling.prompt_logprobs
            if num_top is None or row.start >= len(request.prompt_token_ids) - 1:
                continue
            # The logits at position p judge the prompt's token p + 1; the last has none.
            prompt = request.prompt_token_ids
            token_ids = prompt[row.start + 1 : row.start + len(row.token_ids) + 1]
            begin = int(batch.query_start[index])
            columns = []
            for first in range(0, len(token_ids), _PROMPT_LOGPROB_ROWS):
                ids = token_ids[first : first + _PROMPT_LOGPROB_ROWS]
                logits = self._model.logits(hidden[begin + first : begin + first + len(ids)])
                chosen = to_device(torch.tensor(ids), logits.device)
                columns.append(logprob_columns(logits, chosen, num_top))
            judged.append(JudgedRow(row.id, num_top, columns))
        return judged


def _last_tokens(sent: DeviceBatch) -> torch.Tensor:
    """Where the last tokens of the sampling rows lie in the batch: [S] int32."""
    return sent.rows.query_start[1:].index_select(0, sent.sampling_rows) - 1


class _OnTheWay:
    """A step whose results are being fetched."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Outcome | PassesOutcome) -> None:
        self._outcome = outcome

    def result(self) -> StepResult:
        """See ``Launched``."""
        with translated_errors():
            return self._outcome.result()
