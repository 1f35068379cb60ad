"""Rank 0's side: starts the other ranks and has them do their part of each pass.

    start ─► Join ─► (all read their weights) ─► Loaded
          ─► AllocateCache ─► Prepared ─► (all meet) ─► RendezvousDone
    (those of other machines connect by themselves: ``rank_listener.py``; they meet via
    ``store.py``)
    then, for each pass: [SwapBlocks] [CopyStates] [CopyBlocks] Forward [CopyStates]
    and ComputeLogits for each piece of logits that is not captured
    and between passes: CaptureStep ─► Done or Failed
    and between steps: Sleep ─► Done, [ReadWeights ─► Done or Failed ─► FinishReload],
                       Wake ─► Done or Failed

The loss of a rank ends the engine, because a part of the model and of every sequence's cache is
lost with it. Streams continue in the engine that replaces this one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import EngineDead, ModelLoadError
from engine.framing import encode
from engine.kv_cache.states import num_state_lines
from engine.models.modules import Modules
from engine.models.spec import DecoderSpec
from engine.parallel.common_memory import common_memory_plan
from engine.parallel.forward_message import forward_message
from engine.parallel.frames import (
    AllocateCache,
    CaptureStep,
    ComputeLogits,
    CopyBlocks,
    CopyStates,
    FinishReload,
    Join,
    LoadAdapter,
    Loaded,
    Prepared,
    ReadWeights,
    RendezvousDone,
    Sleep,
    SwapBlocks,
    Wake,
    pack,
)
from engine.parallel.group import LOOPBACK, Group, Rendezvous, file_store
from engine.parallel.layers import parallelize_modules
from engine.parallel.pipeline import Pipeline, connect
from engine.parallel.rank_links import RankLinks
from engine.parallel.rank_listener import RankListener, RemoteRank
from engine.parallel.rank_monitor import RankMonitor
from engine.parallel.ranks import LocalRank, Rank
from engine.parallel.registration import RegisterRank
from engine.parallel.shard import Shard
from engine.parallel.sharding_support import check_sharding_support
from engine.parallel.stages import stage_layers
from engine.parallel.store import StoreRelay
from engine.runner.device import choose_device, choose_dtype, dtype_name
from engine.runner.images import NO_IMAGES, StepImages
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.runner.step_peers import GraphKey, NotCapturedError
from engine.scratch import ScratchDirectory
from engine.types import Adapter, BlockCopy, MemoryPlan

logger = logging.getLogger(__name__)

_END_GRACE_S = 2.0


class Team:
    """The other ranks of a model whose rank 0 is this process.

    Args:
        config: of the engine; the others get the same, except for speculation.
        spec: of the whole model.

    Raises:
        ModelLoadError: the model cannot be sharded this way; nothing has been started then.
    """

    def __init__(self, config: EngineConfig, spec: DecoderSpec) -> None:
        check_sharding_support(config, spec)
        self.shard = Shard.of(config, 0)
        self._spec = spec
        self._num_lines = partial(num_state_lines, config)
        theirs = _follower_config(config, spec)
        self._listener = (
            RankListener(config, partial(_join_message, theirs)) if config.nodes else None
        )
        self._directory = ScratchDirectory("ranks")
        self._monitor = RankMonitor()
        self._links = RankLinks()
        self._ranks = self._links.ranks
        self._rendezvous_file = None if config.nodes else self._directory.path / "meeting"
        self._end = weakref.finalize(
            self, _end, self._ranks, self._listener, self._monitor, self._directory
        )
        self._address = LOOPBACK if self._listener is None else self._listener.address
        meeting = None if self._rendezvous_file is None else str(self._rendezvous_file)
        for rank in range(1, config.ranks_per_node):
            self._links.add([LocalRank(rank)])
            self._links.send(rank, Join(theirs, rank, meeting, self._address))
        self.group: Group | None = None
        self.pipeline: Pipeline | None = None
        self.captures_steps = False  # whether all the others do
        self._block_size = 0
        self._is_asleep = False
        self._in_captured = False  # logits of captured steps are not announced

    def rendezvous(
        self, memory: MemoryPlan, device: torch.device, dtype: torch.dtype
    ) -> MemoryPlan:
        """Wait until all ranks have their weights, and connect them.

        Args:
            memory: this rank's plan.
            device: of this rank.
            dtype: of hidden states.

        Returns:
            The plan that fits on every rank.

        Raises:
            ModelLoadError: a rank could not load.
            EngineDead: a rank is gone.
        """
        here = len(self._ranks) + 1
        loaded = self._links.expect_all(Loaded, range(1, here))
        if self._listener is not None:
            self._links.add(self._listener.wait())
            loaded += self._links.expect_all(Loaded, range(here, self.shard.num_ranks))
        memory = common_memory_plan(memory, loaded, self._num_lines)
        self.captures_steps = all(told.captures_steps for told in loaded)
        self._block_size = memory.block_size
        self._links.broadcast(
            AllocateCache(
                memory.num_blocks,
                memory.max_model_len,
                memory.num_host_blocks,
                memory.num_states,
                memory.num_snapshots,
            )
        )
        self._links.expect_all(Prepared)
        self._monitor.start(self._ranks)
        self._connect(device, dtype)
        if device.type == "cpu":  # NCCL reads the file occasionally
            self._directory.close()
        weights = (memory.weights_bytes, *(told.weights_bytes for told in loaded))
        logger.info(
            "%s: %d ranks, MiB of weights on each: %s; the memory below is one rank's",
            self._describe(),
            self.shard.num_ranks,
            ", ".join(f"{size / 2**20:,.0f}" for size in weights),
        )
        return memory

    def parallelize(self, modules: Modules) -> Modules:
        """Connect rank 0's modules with those of the others. Only after ``rendezvous``."""
        if self.group is None:
            return modules
        return parallelize_modules(
            modules, self._spec, self.shard, self.group, self._announce_logits
        )

    def on_loss(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the reason, in a thread of its own, when a rank is gone."""
        self._monitor.callback = callback

    def close(self) -> None:
        """End the other ranks. Idempotent; also called when the team is garbage-collected."""
        self._end()

    # ------------------------------------------------------------ sleep

    def sleep(self, level: int) -> None:
        """Make all ranks free their caches, and weights according to the level (``Runner.sleep``).

        Raises EngineDead.
        """
        self._is_asleep = True
        self._links.broadcast(Sleep(level))
        self._links.expect_all_done()

    def wake(self) -> None:
        """Make all ranks allocate their caches again, if they have none.

        Raises:
            ModelLoadError: one is out of memory; call ``sleep`` again then.
            EngineDead: a rank is gone.
        """
        if self._is_asleep:
            self._links.broadcast(Wake())
            self._links.expect_all_done()
            self._is_asleep = False

    @contextlib.contextmanager
    def reading_weights(self, model: str, generation: int) -> Iterator[None]:
        """Make the other ranks read their shards of ``model`` while the caller reads its own.

        They keep the new weights if all ranks could read theirs, else the old ones.

        Raises:
            ModelLoadError: one could not.
            EngineDead: a rank is gone.
        """
        self._links.broadcast(ReadWeights(model, generation))
        adopts = False
        try:
            try:
                yield
            except Exception:
                with contextlib.suppress(ModelLoadError):
                    self._links.expect_all_done()
                raise
            self._links.expect_all_done()
            adopts = True
        finally:
            self._links.broadcast(FinishReload(adopts))

    # ------------------------------------------------------------ steps

    def swap_blocks(self, offloads: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Make all ranks exchange blocks with host memory. Raises EngineDead."""
        self._links.broadcast(
            SwapBlocks(*(pack(np.array(pairs, np.int32)) for pairs in (offloads, loads)))
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Make all ranks copy blocks. Raises EngineDead."""
        self._links.broadcast(CopyBlocks(pack(np.array(copies, np.int32))))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make all ranks copy recurrent states between lines. Raises EngineDead."""
        self._links.broadcast(CopyStates(pack(np.array(pairs, np.int32))))

    def load_adapter(self, adapter: Adapter) -> None:
        """Make all ranks load an adapter. Raises EngineDead."""
        self._links.broadcast(LoadAdapter(adapter))

    @contextlib.contextmanager
    def forward(
        self,
        batch: HostBatch,
        table: RowTable,
        images: StepImages = NO_IMAGES,
        *,
        sampled_only: bool,
        graph: GraphKey | None = None,
    ) -> Iterator[None]:
        """Have the other ranks compute a pass while the caller computes it too.

        Args:
            batch: the rows.
            table: holds them.
            images: the images in them.
            sampled_only: only the last tokens of sampling rows are needed.
            graph: the captured step that computes it; None: it is not captured.

        Raises:
            EngineDead: a rank is gone, or the caller failed midway: the ranks are then out of step.
        """
        given = batch, table, images, self._block_size, graph
        recurrent = self._spec.is_recurrent
        message = forward_message(*given, is_recurrent=recurrent, sampled_only=sampled_only)
        self._links.broadcast(message)
        with _shared_pass(), self._captured(graph):
            if images.tokens is not None and self.group is not None:
                self.group.broadcast(
                    torch.stack((images.tokens.embeddings, *images.tokens.deepstack))
                )
            yield

    @contextlib.contextmanager
    def capturing(self, graph: GraphKey, /) -> Iterator[None]:
        """See ``StepPeers.capturing``."""
        self._links.broadcast(CaptureStep(graph))
        failure: NotCapturedError | None = None
        with _shared_pass(), self._captured(graph):
            try:
                yield
            except NotCapturedError as error:
                failure = error
        try:
            self._links.expect_all_done()
        except ModelLoadError as error:
            failure = failure or NotCapturedError(str(error))
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _announce_logits(self, num_rows: int) -> Iterator[None]:
        if self._in_captured:
            yield
            return
        self._links.broadcast(ComputeLogits(num_rows), self.shard.size)
        with _shared_pass():
            yield

    @contextlib.contextmanager
    def _captured(self, graph: GraphKey | None) -> Iterator[None]:
        self._in_captured = graph is not None
        try:
            yield
        finally:
            self._in_captured = False

    # ------------------------------------------------------------ helpers

    def _connect(self, device: torch.device, dtype: torch.dtype) -> None:
        """Meet the others; all ranks do so at once."""
        shard, relay = self.shard, None
        if self._rendezvous_file is None:
            relay = StoreRelay(self._ranks, self._links.messages)
            store = relay.store
        else:
            store = file_store(self._rendezvous_file, shard.num_ranks)
        meeting = Rendezvous(shard, device, store, self._address, self._monitor.name_lost)
        self.group, self.pipeline = connect(meeting, self._spec, dtype)
        if relay is None:
            self._links.expect_all(RendezvousDone)
        else:
            relay.finish()

    def _describe(self) -> str:
        """Describe how the model is sharded, for users."""
        shard, parts = self.shard, ["tensor parallel"] if self.shard.size > 1 else []
        if shard.num_stages > 1:
            runs = stage_layers(self._spec, shard.num_stages)
            layers = ", ".join(str(end - begin) for begin, end in runs)
            parts.append(f"pipeline parallel in {shard.num_stages} stages of {layers} layers")
        return ", ".join(parts)


@contextlib.contextmanager
def _shared_pass() -> Iterator[None]:
    """Raise EngineDead when what all ranks do fails here, as the others wait for it."""
    try:
        yield
    except EngineDead:
        raise
    except Exception as error:
        logger.exception("a pass failed on rank 0")
        raise EngineDead(f"{type(error).__name__} in a pass that ranks share") from error


def _follower_config(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """Return the config for the other ranks. On another machine these might choose another
    device and dtype by themselves, and they need not know the path of the secret."""
    nodes = config.nodes
    if nodes is not None:
        nodes = msgspec.structs.replace(nodes, secret_file="")
    device = choose_device(config.device, config.first_device)
    dtype = dtype_name(choose_dtype(config.dtype, spec.checkpoint_dtype, device))
    given = {"speculation": None, "nodes": nodes, "device": device.type, "dtype": dtype}
    return msgspec.structs.replace(config, **given)


def _join_message(
    theirs: EngineConfig, number: int, enlist: RegisterRank, rank: RemoteRank
) -> bytes:
    """Return the first message to a rank on another machine."""
    own = {"model": enlist.model, "num_threads": enlist.num_threads}
    config = msgspec.structs.replace(theirs, **own)
    return encode(Join(config, number, None, rank.address))


def _end(
    ranks: Sequence[Rank],
    listener: RankListener | None,
    monitor: RankMonitor,
    directory: ScratchDirectory,
) -> None:
    """End all ranks and wait for them; each exits when its socket is shut down."""
    monitor.end()
    if listener is not None:
        listener.close()
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.socket.shutdown(socket.SHUT_RDWR)
    monitor.join()
    for rank in ranks:
        rank.end(_END_GRACE_S)
    directory.close()
