"""Runs plans on a loaded model (see ``engine/runner/protocol.py`` for the contract).

    plan ─► rows, on the host ─► one transfer ─► inputs ─► layers ─► logits ─► sample ─► feed back
                                                                                 └─► one fetch

Nothing between the transfer and the fetch waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.kv_cache.storage import KVCache
from engine.lora.batch import adapter_slots, step_adapters
from engine.lora.store import AdapterStore
from engine.models.decoder import Decoder
from engine.plan_rows import PlanRows
from engine.profiler import Spans
from engine.runner import prompt_results
from engine.runner.device_errors import translated_errors
from engine.runner.drafts import DraftTokens, StepDrafts, expand_drafts, step_drafts
from engine.runner.graphs import DecodeGraph, DecodeGraphs, HeadFeatures
from engine.runner.host_blocks import HostBlocks
from engine.runner.images import NO_IMAGES, MediaEmbedder, StepImages
from engine.runner.inputs import HostBatch, extend_tables, host_batch, send
from engine.runner.kernel_warmup import KernelWarmup
from engine.runner.launched_steps import PendingStep, PipelinedStep
from engine.runner.outcome import Outcome, SampledRows
from engine.runner.passes import MultiPassOutcome, later_passes
from engine.runner.prepared import BatchInputs, HiddenStates, PreparedBatch
from engine.runner.programs import DecodePrograms
from engine.runner.prompt_graphs import PromptGraphs
from engine.runner.protocol import CompletedStep, ImagePrefetcher, LaunchedStep, SleepingRunner
from engine.runner.rows import RowTable
from engine.runner.sampling import Sampler, StepMasks
from engine.runner.snapshots import Snapshots
from engine.runner.step_builder import StepBuilder
from engine.runner.step_peers import GraphKey
from engine.runner.transfer import Downloads, Uploads
from engine.runner.trials import begin_trial
from engine.speculation.draft_model import DraftModel
from engine.speculation.features import Features
from engine.types import Adapter, BlockCopy, EngineInfo, StateCopy, StepPlan, StepResult
from kernels.attention import AttentionSpec
from kernels.operations import Kernels

if TYPE_CHECKING:
    from engine.parallel.leader import Team


class ModelRunner:
    """A model, its KV cache and the rows that have been added. All calls come from one thread.

    Args:
        info: what was loaded.
        model: the decoder.
        cache: its KV cache.
        kernels: those the decoder was made with.
        attention_spec: what the kernels were chosen for.
        rows: an empty table.
        adapters: an empty store.
        graphs: captured decode steps, or programs of them; None: they cannot be captured.
        draft: proposes the drafts of rows that ask for it; None: no row does.
        prompt_graphs: captured steps with prompts; None: they cannot be captured.
        features: what the draft model reads of the model, if it is a head.
        rejection_sampling: verify drafts of sampled texts by rejection sampling.
        warmup: kernels to run once after the first answers.
        team: the ranks with the other shards; None: the whole model is here.
        host: KV blocks in host memory; None: there are none.
        snapshots: of the rows' recurrent states; None: the model has none.
        media: reads the images and audio of prompts; None: the model takes none.
        make_sleeping: makes what the runner leaves behind when it sleeps at a level.
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
        prompt_graphs: PromptGraphs | None = None,
        features: Features | None = None,
        rejection_sampling: bool = False,
        warmup: KernelWarmup,
        team: Team | None = None,
        host: HostBlocks | None = None,
        snapshots: Snapshots | None = None,
        media: MediaEmbedder | None = None,
        make_sleeping: Callable[[int], SleepingRunner],
    ) -> None:
        self._info = info
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._builder = StepBuilder(model.rotations, kernels, attention_spec)
        self._rows = rows
        self._adapters = adapters
        self._graphs = graphs
        self._draft = draft
        self._prompt_graphs = prompt_graphs
        self._features = features
        self._warmup = warmup
        self._team = team
        self._pipeline = None if team is None else team.pipeline
        self._host = host
        self._snapshots = snapshots
        self._media = media
        self._make_sleeping = make_sleeping
        operations, uploads = kernels.operations, Uploads(attention_spec.device)
        self._sampler = Sampler(operations, rows, uploads, rejection_sampling=rejection_sampling)
        self._uploads = Uploads(attention_spec.device)
        self._is_cpu = attention_spec.device.type == "cpu"
        # On a GPU, steps read images: timing a read-ahead would mean waiting for the device.
        self.image_prefetcher: ImagePrefetcher | None = media if self._is_cpu else None
        self._downloads = Downloads(attention_spec.device)
        self._spans = Spans()

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start one step. Raises as ``LaunchedStep.result`` does."""
        with translated_errors(), torch.inference_mode():
            return self._launch(plan)

    def set_spans(self, spans: Spans) -> None:
        """See ``Runner.set_spans``."""
        self._spans = spans

    def load_adapter(self, adapter: Adapter) -> None:
        """See ``Runner.load_adapter``."""
        self._adapters.load(adapter)
        if self._team is not None:
            self._team.load_adapter(adapter)

    def on_loss(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` in a thread of its own when a part of the model is lost."""
        if self._team is not None:
            self._team.on_loss(callback)

    def prepare(self) -> bool:
        """Capture the next graph if one remains, or rehearse kernels; see ``Runner.prepare``."""
        with translated_errors(), torch.inference_mode():
            for captured in (self._graphs, self._prompt_graphs, self._draft):
                if captured is not None and captured.capture_next():
                    return True
            return self._warmup.run_next()

    def sleep(self, level: int) -> SleepingRunner:
        """See ``Runner.sleep``."""
        return self._make_sleeping(level)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with self._spans("inputs"):
            self._update_rows(plan)
            if self._host is not None:
                self._host.exchange(plan)
            if not plan.rows:
                return CompletedStep(StepResult())
            extend_tables(plan.rows, self._rows)
            if self._snapshots is not None:
                self._snapshots.restore(plan.restores)
            rows, draft_tokens = self._propose_drafts(plan)
            drafts = step_drafts(rows, draft_tokens)
            if drafts is not None:
                rows = expand_drafts(rows)
            batch = host_batch(rows, self._rows)
            ready = self._load(batch, plan.copies, drafts)
        if self._pipeline is not None:
            return self._launch_pipelined(rows, batch, ready, plan.saves)
        sampled, results = self._run(rows, batch, ready)
        if self._snapshots is not None:
            self._snapshots.save(plan.saves)
        first = Outcome(rows, batch.sampling_rows, sampled, *results, self._downloads, drafts)
        if not rows.num_passes or not self._sampler.is_plain(batch):
            return PendingStep(first)
        passes = [first]
        for places, later in later_passes(batch, rows.num_passes):
            with self._spans("inputs"):
                ready = self._load(later)
            sampled, results = self._run(rows, later, ready)
            passes.append(Outcome(rows, places, sampled, *results, self._downloads))
        return PendingStep(MultiPassOutcome(passes, is_recurrent=self._info.is_recurrent))

    def _load(
        self,
        batch: HostBatch,
        copies: tuple[BlockCopy, ...] = (),
        drafts: StepDrafts | None = None,
    ) -> PreparedBatch:
        """Copy a batch to where it is computed."""
        adapted = adapter_slots(self._adapters, batch, self._rows)
        graph = inputs = trial = None
        if not self._is_special(batch, copies):
            graph = self._load_graph(batch, adapted, drafts)
            on_trial = drafts is not None and self._info.is_recurrent
            if graph is None and not on_trial:
                inputs = self._load_prompt_graph(batch, adapted, drafts)
        if graph is not None:
            if drafts is not None and graph.trial is not None:
                trial = graph.trial.begin(batch, drafts, self._uploads)
        elif inputs is None:
            inputs = self._send(batch, copies, adapted, drafts)
            if drafts is not None and self._info.is_recurrent:
                state_rows, held, trial = begin_trial(batch, drafts, self._uploads)
                tried = replace(inputs.state, rows=state_rows, trial=held)
                inputs = inputs._replace(state=tried)
        masks = self._sampler.masks(batch) if self._is_cpu and drafts is None else None
        return PreparedBatch(graph, inputs, drafts, masks, trial)

    def _run(
        self, rows: PlanRows, batch: HostBatch, ready: PreparedBatch
    ) -> tuple[SampledRows | None, prompt_results.PromptResults]:
        """Compute a batch that has been loaded."""
        graph, inputs, drafts, masks, trial = ready
        if graph is not None:
            sampled = self._replay(graph, batch, drafts, masks)
            results = prompt_results.NO_PROMPT_RESULTS
        else:
            assert inputs is not None
            states = partial(self._forward, batch, inputs)
            sampled, results = self._sample(rows, batch, inputs, states, drafts, masks)
        if trial is not None and sampled is not None and sampled.num_accepted is not None:
            with self._spans("sample"):
                trial.settle(sampled.num_accepted)
        return sampled, results

    def _propose_drafts(self, plan: StepPlan) -> tuple[PlanRows, DraftTokens | None]:
        """Return the plan's rows, and drafts if they ask for any; see ``DraftModel.propose``."""
        if self._draft is None:
            return plan.rows, None
        with self._spans("draft"):
            return self._draft.propose(plan)

    def _update_rows(self, plan: StepPlan) -> None:
        if self._draft is not None:
            self._draft.forget(plan.removed)
        for row_id in plan.removed:
            self._rows.remove(row_id)
        for added in plan.added:
            self._rows.add(added)

    def _is_special(self, batch: HostBatch, copies: tuple[BlockCopy, ...]) -> bool:
        """Whether a step does what no captured one does."""
        if copies or prompt_results.are_needed(batch, self._rows):
            return True
        return self._media is not None and self._media.has_image_tokens(batch)

    def _load_graph(
        self, batch: HostBatch, adapted: np.ndarray | None, drafts: StepDrafts | None
    ) -> DecodeGraph | None:
        """Return the step's captured graph, loaded with the batch; None if there is none.

        ``adapted`` is the batch's ``adapter_slots``.
        """
        if self._graphs is None:
            return None
        verifies = drafts is not None
        graph = self._graphs.find(batch, has_drafts=verifies, adapted=adapted is not None)
        if graph is not None:
            self._graphs.load(graph, batch, self._uploads)
            if drafts is not None:
                drafts.fill_inputs(graph.token_ids, batch)
            if graph.adapters is not None and adapted is not None:
                graph.adapters.set(adapted)
        return graph

    def _load_prompt_graph(
        self, batch: HostBatch, adapted: np.ndarray | None, drafts: StepDrafts | None
    ) -> BatchInputs | None:
        """Return the step as loaded into a graph for steps with prompts; None if there is none."""
        graphs = self._prompt_graphs
        if graphs is None or (loaded := graphs.load(batch, adapted, self._uploads)) is None:
            return None
        graph, sent = loaded
        if drafts is not None:
            drafts.fill_inputs(sent.rows.token_ids, batch)
        return BatchInputs(sent, graph.step.inputs, graph.step.state, NO_IMAGES, graph)

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
                self._store_features(graph.head_features, batch)
            return SampledRows(graph.greedy.sampled)
        with self._spans("forward"):
            with self._on_other_ranks(batch, sampled_only=True, graph=graph.key):
                graph.forward()
            self._store_features(graph.head_features, batch)
        with self._spans("sample"):
            if is_plain:
                self._downloads.guard()  # the graph overwrites the last step's tokens
                graph.sample()
                return SampledRows(graph.sampled)
            count = batch.slots.size
            logits, positions = graph.logits[:count].float(), graph.positions[:count]
            slots = graph.slots[:count]
            return self._sampler.sample(logits, batch, slots, positions, drafts, masks)

    def _store_features(self, left: HeadFeatures | None, batch: HostBatch) -> None:
        """Store what a captured step leaves for a draft head, without the padding."""
        if self._features is not None and left is not None:
            count = batch.token_ids.size
            self._features.store(left.slots[:count], left.features[:count])

    def _send(
        self,
        batch: HostBatch,
        copies: tuple[BlockCopy, ...],
        adapted: np.ndarray | None,
        drafts: StepDrafts | None,
    ) -> BatchInputs:
        """Send the step to the device, and build the layers' inputs there."""
        operations, table = self._kernels.operations, self._rows
        sent = send(batch, copies, table, self._uploads)
        if drafts is not None:
            drafts.fill_inputs(sent.rows.token_ids, batch)
        if copies:
            if self._team is not None:
                self._team.copy_blocks(copies)
            sources, targets = sent.copy_sources.long(), sent.copy_targets.long()
            for layer in self._cache.paged:
                operations.copy_blocks(layer, sources, targets)
        seen = NO_IMAGES if self._media is None else self._media.embed(batch, self._uploads)
        inputs, _, state = self._builder.build(batch, sent.rows, table, seen)
        if adapted is not None:
            of_tokens, of_wanted = step_adapters(self._adapters, adapted, batch, operations)
            state = replace(state, adapters=of_tokens, output_adapters=of_wanted)
        return BatchInputs(sent, inputs, state, seen)

    def _launch_pipelined(
        self, rows: PlanRows, batch: HostBatch, ready: PreparedBatch, saves: tuple[StateCopy, ...]
    ) -> LaunchedStep:
        """Compute the first stage's layers, and hand the step to the later stages. Its tokens are
        sampled when its result is read; until then its rows' slots are not reused."""
        inputs, pipeline = ready.inputs, self._pipeline
        assert inputs is not None
        assert pipeline is not None
        with self._spans("forward"):
            hidden, is_of_all = self._forward(batch, inputs)
            pipeline.send(hidden)
        if self._snapshots is not None:
            self._snapshots.save(saves)
        slots = batch.slots.tolist()
        self._rows.hold(slots)
        num_wanted = batch.token_ids.size if is_of_all else batch.sampling_rows.size

        def states() -> HiddenStates:
            with self._spans("stages"):
                return HiddenStates(pipeline.receive_result(num_wanted), is_of_all)

        def finish() -> Outcome:
            try:
                drafts, masks = ready.drafts, ready.masks
                sampled, results = self._sample(rows, batch, inputs, states, drafts, masks)
            finally:
                self._rows.release(slots)
            return Outcome(rows, batch.sampling_rows, sampled, *results, self._downloads, drafts)

        return PipelinedStep(finish)

    def _forward(self, batch: HostBatch, inputs: BatchInputs) -> HiddenStates:
        """Compute this process's layers: the hidden states of all tokens if these are needed, else
        of the sampling rows' last tokens."""
        if (graph := inputs.graph) is not None:
            with self._on_other_ranks(batch, sampled_only=True, graph=graph.key):
                graph.forward()
            self._store_features(graph.head_features, batch)
            hidden = graph.hidden.index_select(0, inputs.sent.sampling_rows)
            return HiddenStates(hidden, covers_all_tokens=False)
        is_of_all = self._features is not None or prompt_results.are_needed(batch, self._rows)
        trims = not is_of_all and not batch.is_decode
        wanted = inputs.sent.last_tokens if trims and self._pipeline is None else None
        step, layers = inputs.step, self._cache.layers
        given = step.input_ids, inputs.state, layers
        if self._features is not None:
            hidden, features = self._features.run(self._model, *given)
            self._features.store(step.slot_mapping, features)
            return HiddenStates(hidden, is_of_all)
        with self._on_other_ranks(batch, inputs.images, sampled_only=trims):
            return HiddenStates(self._model.forward(*given, wanted), is_of_all)

    def _on_other_ranks(
        self,
        batch: HostBatch,
        images: StepImages = NO_IMAGES,
        *,
        sampled_only: bool,
        graph: GraphKey | None = None,
    ) -> AbstractContextManager[None]:
        """Have the other ranks, if there are any, compute a pass while this one does."""
        if (team := self._team) is None:
            return nullcontext()
        return team.forward(batch, self._rows, images, sampled_only=sampled_only, graph=graph)

    def _sample(
        self,
        rows: PlanRows,
        batch: HostBatch,
        inputs: BatchInputs,
        states: Callable[[], HiddenStates],
        drafts: StepDrafts | None,
        masks: StepMasks | None,
    ) -> tuple[SampledRows | None, prompt_results.PromptResults]:
        """Sample tokens from the hidden states, once these exist, and score prompt tokens."""
        sent = inputs.sent
        with self._spans("forward"):
            hidden, is_of_all = states()
            results = prompt_results.NO_PROMPT_RESULTS
            if is_of_all:
                results = prompt_results.compute(
                    rows, batch, self._rows, hidden, self._model.logits
                )
                hidden = hidden.index_select(0, sent.last_tokens)
            if not batch.sampling_rows.size:
                return None, results
            likeliest = logits = None
            if drafts is None and self._sampler.is_plain(batch) and self._sampler.is_greedy(batch):
                likeliest = self._model.sample_greedy(hidden)
            if likeliest is None:
                logits = self._model.logits(hidden)
        with self._spans("sample"):
            slots = sent.rows.slots.index_select(0, sent.sampling_rows)
            if likeliest is not None:
                return self._sampler.feed_back(likeliest, slots), results
            assert logits is not None
            positions = inputs.step.next_positions.index_select(0, sent.sampling_rows)
            return self._sampler.sample(logits, batch, slots, positions, drafts, masks), results
