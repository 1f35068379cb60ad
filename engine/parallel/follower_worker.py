"""A follower rank's part of a model, and how it sleeps and wakes.

    awake ──Sleep──► asleep ──Wake──► awake
                     │    ▲
                     │    └─ FinishReload: the new shard, or the old one
                     └─ReadWeights──► two shards side by side

The connections to other ranks persist throughout. A rank that fails at a task reports it and keeps
sleeping, so that rank 0 can bring all ranks back to the same state.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec
import torch

from engine.errors import ModelLoadError
from engine.gc_tuning import collect_all
from engine.kv_cache.host_store import HostStore
from engine.kv_cache.states import make_states, num_state_lines
from engine.kv_cache.storage import KVCache
from engine.limits import num_row_lines
from engine.lora.store import AdapterStore
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec
from engine.parallel.follower_graphs import FollowerGraphs
from engine.parallel.follower_runner import FollowerRunner, RankCaches
from engine.parallel.frames import (
    AllocateCache,
    CaptureStep,
    Done,
    Failed,
    FinishReload,
    ReadWeights,
    Sleep,
    ToRank,
    Wake,
)
from engine.parallel.layers import parallelize_modules
from engine.parallel.pipeline import Connections
from engine.parallel.shard import Shard
from engine.runner.adapter_load import make_adapters
from engine.runner.graphs import CudaCapture
from engine.runner.host_copy import HostCopy
from engine.runner.load import LoadedWeights, read_weights
from engine.runner.load_plan import LoadPlan, make_plan
from engine.runner.sleeping import release_memory, restore_weights
from engine.runner.step_builder import StepBuilder
from engine.runner.step_peers import GraphKey, NotCapturedError

logger = logging.getLogger(__name__)


class LoadedShard(NamedTuple):
    """A rank's shard of a model in memory, without its cache."""

    plan: LoadPlan
    loaded: LoadedWeights


class FollowerWorker:
    """A rank that has met the others, awake.

    Args:
        shard: this rank's number.
        serve: the size of its cache.
        connections: to the others.
        loaded_shard: of the model.
        caches: for the state of sequences.
    """

    def __init__(
        self,
        shard: Shard,
        serve: AllocateCache,
        connections: Connections,
        loaded_shard: LoadedShard,
        caches: RankCaches,
    ) -> None:
        self._shard = shard
        self._serve = serve
        self._connections = connections
        self._plan = loaded_shard.plan  # of the current or last share
        self._loaded_shard: LoadedShard | None = loaded_shard
        self._new_shard: LoadedShard | None = None  # new weights, not adopted yet
        self._on_host: HostCopy | None = None
        self._runner: FollowerRunner | None = self._make_runner(loaded_shard, caches)

    def handle(self, message: ToRank) -> Done | Failed | None:
        """Execute rank 0's message; return the answer, if any. Raises EngineDead if a rank is
        gone."""
        if isinstance(message, Sleep):
            self._sleep(message.level)
            return Done()
        if isinstance(message, CaptureStep):
            return self._capture(message.graph)
        if isinstance(message, ReadWeights | Wake):
            try:
                if isinstance(message, Wake):
                    self._wake()
                else:
                    self._read_weights(message)
            except Exception as error:  # including out of memory
                if not isinstance(error, ModelLoadError):
                    logger.exception("rank %d could not do what it was asked", self._shard.number)
                reason = str(error).partition("\n")[0] or type(error).__name__
                return Failed(f"rank {self._shard.number}: {reason}")
            return Done()
        if isinstance(message, FinishReload):
            self._finish_reload(adopt=message.adopt)
        else:
            assert self._runner is not None
            with torch.inference_mode():
                self._runner.execute(message)
        return None

    def _capture(self, graph: GraphKey) -> Done | Failed:
        assert self._runner is not None
        try:
            with torch.inference_mode():
                self._runner.capture(graph)
        except NotCapturedError as error:
            return Failed(f"rank {self._shard.number}: {error}")
        return Done()

    def _sleep(self, level: int) -> None:
        device = self._plan.attention.device
        self._runner = None
        if level >= 2:
            self._loaded_shard = self._on_host = None
        collect_all()
        if level == 1 and device.type == "cuda" and self._on_host is None:
            self._on_host = HostCopy.of(self._loaded_shard, device)
        release_memory(device)

    def _wake(self) -> None:
        if self._on_host is not None:
            restore_weights(self._on_host, self._plan.attention.device)
            self._on_host = None
        assert self._loaded_shard is not None
        self._runner = self._make_runner(
            self._loaded_shard, allocate_caches(self._plan, self._serve)
        )

    def _read_weights(self, message: ReadWeights) -> None:
        """Read the new share as the first one was, with the same number of threads."""
        former = self._plan
        config = msgspec.structs.replace(
            former.config, model=message.model, generation=message.generation
        )
        model = read_config(config.model)
        assert isinstance(model.spec, DecoderSpec)  # checked by rank 0
        plan = make_plan(config, model, model.spec, self._shard, num_threads=former.num_threads)
        self._new_shard = LoadedShard(plan, read_weights(plan, None))

    def _finish_reload(self, *, adopt: bool) -> None:
        if adopt:
            self._loaded_shard = self._new_shard
            assert self._loaded_shard is not None
            self._plan = self._loaded_shard.plan
        self._new_shard = None
        collect_all()
        release_memory(self._plan.attention.device)

    def _make_runner(self, loaded_shard: LoadedShard, caches: RankCaches) -> FollowerRunner:
        plan, (group, pipeline) = loaded_shard.plan, self._connections
        modules = loaded_shard.loaded.modules
        if group is not None:
            modules = parallelize_modules(modules, plan.spec, self._shard, group)
        length = self._serve.max_model_len
        decoder = Decoder(plan.spec, modules, plan.kernels, length, group)
        adapters, graphs = make_adapters(plan), None
        if plan.captures_steps:
            graphs = self._graphs(plan, decoder, caches.cache, adapters)
        connections = group, pipeline
        return FollowerRunner(plan, self._shard, decoder, caches, *connections, adapters, graphs)

    def _graphs(
        self, plan: LoadPlan, decoder: Decoder, cache: KVCache, adapters: AdapterStore
    ) -> FollowerGraphs:
        spec, serve = plan.attention, self._serve
        return FollowerGraphs(
            decoder,
            cache,
            plan.kernels,
            spec,
            StepBuilder(decoder.rotations, plan.kernels, spec),
            num_row_lines(plan.config, serve.num_states),
            min(serve.num_blocks, -(-serve.max_model_len // spec.block_size)),
            CudaCapture(),
            adapters,
            has_rotary_positions=plan.images is not None and plan.images.table_cell is not None,
        )


def allocate_caches(plan: LoadPlan, serve: AllocateCache) -> RankCaches:
    """Allocate a cache of the common size. Raises ModelLoadError if it does not fit."""
    attention = plan.attention
    num_lines = num_state_lines(plan.config, serve.num_states, serve.num_snapshots)
    states = make_states(plan.spec, num_lines, attention.dtype, attention.device)
    cache = KVCache(
        plan.spec,
        serve.num_blocks,
        attention.block_size,
        attention.dtype,
        attention.device,
        attention.cache_dtype,
        states,
        interleave_layers=plan.kernels.supports_interleaved_layers,
    )
    slots = serve.num_host_blocks
    return RankCaches(cache, states, HostStore(cache.tensors(), slots) if slots else None)
