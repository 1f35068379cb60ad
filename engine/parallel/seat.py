"""A follower rank's part of a model, and how it rests and wakes.

    awake ──Rest──► resting ──Wake──► awake
                     │   ▲
                     │   └─ Settle: the new shard, or the old one
                     └─Reread──► two shards side by side

The connections to other ranks persist throughout. A rank that fails at a task reports it and keeps
resting, so that rank 0 can bring all ranks back to the same state.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec
import torch

from engine.collector import reclaim
from engine.errors import ModelLoadError
from engine.kv_cache.host_store import HostStore
from engine.kv_cache.states import make_states, num_state_lines
from engine.kv_cache.storage import KVCache
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec
from engine.parallel.computing import Follower, Room
from engine.parallel.frames import Done, Failed, Reread, Rest, Serve, Settle, ToRank, Wake
from engine.parallel.layers import share_modules
from engine.parallel.pipeline import Connections
from engine.parallel.shard import Shard
from engine.runner.host_copy import HostCopy
from engine.runner.load import Loaded, read_weights
from engine.runner.load_plan import LoadPlan, make_plan
from engine.runner.resting import bring_back, give_back

logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """A rank's shard of a model in memory, without its cache."""

    plan: LoadPlan
    loaded: Loaded


class Seat:
    """A rank that has met the others, awake.

    Args:
        shard: this rank's number.
        serve: the size of its cache.
        connections: to the others.
        share: of the model.
        room: for the state of sequences.
    """

    def __init__(
        self, shard: Shard, serve: Serve, connections: Connections, share: Share, room: Room
    ) -> None:
        self._shard = shard
        self._serve = serve
        self._connections = connections
        self._plan = share.plan  # of the current or last share
        self._share: Share | None = share
        self._fresh: Share | None = None  # new weights, not adopted yet
        self._on_host: HostCopy | None = None
        self._follower: Follower | None = self._seated(share, room)

    def obey(self, message: ToRank) -> Done | Failed | None:
        """Execute rank 0's message; return the answer, if any. Raises EngineDead if a rank is
        gone."""
        if isinstance(message, Rest):
            self._rest(message.level)
            return Done()
        if isinstance(message, Reread | Wake):
            try:
                if isinstance(message, Wake):
                    self._wake()
                else:
                    self._reread(message)
            except Exception as error:  # including out of memory
                if not isinstance(error, ModelLoadError):
                    logger.exception("rank %d could not do what it was asked", self._shard.number)
                told = str(error).partition("\n")[0] or type(error).__name__
                return Failed(f"rank {self._shard.number}: {told}")
            return Done()
        if isinstance(message, Settle):
            self._settle(adopts=message.adopts)
        else:
            assert self._follower is not None
            with torch.inference_mode():
                self._follower.obey(message)
        return None

    def _rest(self, level: int) -> None:
        device = self._plan.attention.device
        self._follower = None
        if level >= 2:
            self._share = self._on_host = None
        reclaim()
        if level == 1 and device.type == "cuda" and self._on_host is None:
            self._on_host = HostCopy.of(self._share, device)
        give_back(device)

    def _wake(self) -> None:
        if self._on_host is not None:
            bring_back(self._on_host, self._plan.attention.device)
            self._on_host = None
        assert self._share is not None
        self._follower = self._seated(self._share, make_room(self._plan, self._serve))

    def _reread(self, message: Reread) -> None:
        """Read the new share as the first one was, with the same number of threads."""
        former = self._plan
        config = msgspec.structs.replace(
            former.config, model=message.model, generation=message.generation
        )
        model = read_config(config.model)
        assert isinstance(model.spec, DecoderSpec)  # checked by rank 0
        plan = make_plan(config, model, model.spec, self._shard, threads=former.threads)
        self._fresh = Share(plan, read_weights(plan, None))

    def _settle(self, *, adopts: bool) -> None:
        if adopts:
            self._share = self._fresh
            assert self._share is not None
            self._plan = self._share.plan
        self._fresh = None
        reclaim()
        give_back(self._plan.attention.device)

    def _seated(self, share: Share, room: Room) -> Follower:
        plan, (group, pipeline) = share.plan, self._connections
        modules = share.loaded.modules
        if group is not None:
            modules = share_modules(modules, plan.spec, self._shard, group)
        length = self._serve.max_model_len
        decoder = Decoder(plan.spec, modules, plan.kernels, length, group)
        return Follower(plan, self._shard, decoder, room, group, pipeline)


def make_room(plan: LoadPlan, serve: Serve) -> Room:
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
        side_by_side=plan.kernels.takes_side_by_side,
    )
    slots = serve.num_host_blocks
    return Room(cache, states, HostStore(cache.tensors(), slots) if slots else None)
