"""The computation of a follower rank: it executes what rank 0 sends, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import EngineDead
from engine.kv_cache.host_store import HostStore
from engine.kv_cache.states import copy_states
from engine.kv_cache.storage import KVCache
from engine.lora.batch import step_adapters
from engine.lora.store import AdapterStore
from engine.models.decoder import Decoder
from engine.models.layer_state import LayerState
from engine.models.step_state import StepImageEmbeddings, StepState
from engine.parallel.follower_graphs import FollowerGraphs, SentLines
from engine.parallel.frames import (
    ComputeLogits,
    CopyBlocks,
    CopyStates,
    Forward,
    LoadAdapter,
    SwapBlocks,
    ToRank,
    unpack,
)
from engine.parallel.group import Group
from engine.parallel.pipeline import Pipeline
from engine.parallel.shard import Shard
from engine.runner.images import StepImages
from engine.runner.inputs import AttentionEnds, HostBatch
from engine.runner.load_plan import LoadPlan
from engine.runner.step_builder import StepBuilder
from engine.runner.step_peers import GraphKey
from engine.runner.transfer import Uploads
from engine.types import BlockCopy
from kernels.inputs import StepRows


class RankCaches(NamedTuple):
    """Memory for the state of sequences."""

    cache: KVCache  # keys and values
    states: Sequence[LayerState]  # of recurrent layers
    host: HostStore | None  # blocks in host memory; None: there are none


class FollowerRunner:
    """Computes what rank 0 computes, on this rank's shard.

    Args:
        plan: the decisions made at load.
        shard: this rank's.
        model: this rank's shard of the model, connected to the others.
        caches: for the state of sequences.
        group: the ranks of its stage; None: it is alone there.
        pipeline: connections to other stages; None: there are none.
        adapters: an empty store.
        graphs: of this rank's steps; None: they cannot be captured.
    """

    def __init__(
        self,
        plan: LoadPlan,
        shard: Shard,
        model: Decoder,
        caches: RankCaches,
        group: Group | None,
        pipeline: Pipeline | None,
        adapters: AdapterStore,
        graphs: FollowerGraphs | None,
    ) -> None:
        self._plan = plan
        self._shard = shard
        self._group = group
        self._pipeline = pipeline
        self._adapters = adapters
        self._model = model
        self._cache, self._states, self._host = caches
        self._graphs = graphs
        self._builder = StepBuilder(model.rotations, plan.kernels, plan.attention)
        self._uploads = Uploads(plan.attention.device)

    def execute(self, message: ToRank) -> None:
        """Execute a message from rank 0. Raises EngineDead when another rank is gone."""
        if isinstance(message, Forward):
            self._forward(message)
        elif isinstance(message, ComputeLogits):
            attention = self._plan.attention
            shape = message.num_rows, self._plan.spec.hidden_size
            self._model.logits(torch.empty(shape, dtype=attention.dtype, device=attention.device))
        elif isinstance(message, SwapBlocks):
            assert self._host is not None
            self._host.exchange(_copies(message.offloads), _copies(message.loads))
        elif isinstance(message, CopyStates):
            lines = unpack(message.pairs).reshape(-1, 2).tolist()
            copy_states(self._states, ((source, target) for source, target in lines))
        elif isinstance(message, LoadAdapter):
            self._adapters.load(message.adapter)
        elif isinstance(message, CopyBlocks):
            pairs = unpack(message.pairs).reshape(-1, 2)
            sources, targets = self._upload(pairs[:, 0].copy(), pairs[:, 1].copy())
            for layer in self._cache.paged:
                self._plan.kernels.operations.copy_blocks(layer, sources.long(), targets.long())

    def capture(self, graph: GraphKey) -> None:
        """Capture a step while rank 0 does.

        Raises:
            NotCapturedError: this rank could not; it has communicated as if it could.
            EngineDead: it captures nothing, which it has told rank 0.
        """
        if self._graphs is None:
            raise EngineDead("rank 0 captures steps, and this rank cannot")
        self._graphs.capture(graph)

    def _forward(self, message: Forward) -> None:
        batch = _batch(message)
        adapted = self._adapter_slots(message) if message.adapters else None
        if message.graph is not None:
            assert self._graphs is not None
            self._graphs.replay(message.graph, message, batch, adapted)
            return
        host_tables = unpack(message.tables).reshape(batch.slots.size, -1)
        last = batch.query_start[1:][batch.sampling_rows] - 1
        of_states = unpack(message.lines) if message.lines else batch.slots
        on_host = unpack(message.query_ends) if message.query_ends else None
        sent = self._upload(
            *(batch.slots, batch.query_start, batch.starts, batch.token_ids),
            *(host_tables, last, of_states, unpack(message.rotary_positions).reshape(3, -1)),
            *(unpack(message.query_ends), unpack(message.image_places)),
        )
        slots, query_start, starts, token_ids, tables, wanted, lines, turns, ends, shown = sent
        rows = StepRows(slots, query_start, starts, token_ids)
        of_rows = SentLines(host_tables, tables, rows.slots.long())
        seen = StepImages(
            self._receive_images(shown.long(), message.num_deepstack),
            attention_ends=None if on_host is None else AttentionEnds(on_host, ends),
        )
        turning = turns if message.rotary_positions else None
        built = self._builder.build(batch, rows, of_rows, seen, rotary_positions=turning)
        state = replace(built.state, rows=rows._replace(slots=lines))
        if adapted is not None:
            operations = self._plan.kernels.operations
            of_tokens, of_wanted = step_adapters(self._adapters, adapted, batch, operations)
            state = replace(state, adapters=of_tokens, output_adapters=of_wanted)
        is_trimmed = message.sampling_rows is not None and self._shard.is_last_stage
        self._run(built.inputs.input_ids, state, wanted if is_trimmed else None)

    def _run(self, input_ids: torch.Tensor, state: StepState, wanted: torch.Tensor | None) -> None:
        """Run this rank's layers; the token ids come from rank 0."""
        model, pipeline, caches = self._model, self._pipeline, self._cache.layers
        if pipeline is None:
            model.forward(input_ids, state, caches, wanted)
        elif not self._shard.stage:
            pipeline.send(model.forward(input_ids, state, caches))
        else:
            x = pipeline.receive(input_ids.shape[0])
            pipeline.send(model.forward_hidden(x, state, caches, wanted))

    def _receive_images(
        self, places: torch.Tensor, num_deepstack: int
    ) -> StepImageEmbeddings | None:
        """Receive the embeddings of image tokens from rank 0."""
        if not places.numel() or self._shard.stage or self._group is None:
            return None
        attention = self._plan.attention
        shape = 1 + num_deepstack, places.numel(), self._plan.spec.hidden_size
        states = torch.empty(shape, dtype=attention.dtype, device=attention.device)
        embeddings, *deep = self._group.broadcast(states)
        return StepImageEmbeddings(places, embeddings, tuple(deep))

    def _adapter_slots(self, message: Forward) -> np.ndarray:
        """[R] int64, the slots of the rows' adapters on this rank; -1: none."""
        found = self._adapters.slots(message.adapters)
        by_place = np.array([*(found[adapter.id] for adapter in message.adapters), -1], np.int64)
        return by_place[unpack(message.adapter_rows)]

    def _upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return self._uploads.send(arrays)


def _batch(message: Forward) -> HostBatch:
    """Make the batch of the rows that rank 0 sent, each in the table line of its place in the
    message."""
    query_start, starts = unpack(message.query_start), unpack(message.starts)
    slots = np.arange(len(starts), dtype=np.int32)
    sampling_rows = slots if message.sampling_rows is None else unpack(message.sampling_rows)
    tokens = np.zeros(query_start[-1], np.int32)  # rank 0 has them
    return HostBatch(slots, query_start, starts, tokens, sampling_rows)


def _copies(pairs: bytes) -> list[BlockCopy]:
    return [BlockCopy(source, target) for source, target in unpack(pairs).reshape(-1, 2).tolist()]
