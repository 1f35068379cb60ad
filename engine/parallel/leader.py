"""Rank 0's side: starts the other ranks, sends them their work, and notices when one is gone.

    start ─► Join ─► (all read their weights) ─► Loaded ─► Serve ─► Prepared ─► (all meet) ─► Met
    (those of other machines connect by themselves: ``gathering.py``; they meet via ``board.py``)
    then, for each pass: [Exchange] [CopyStates] [CopyBlocks] Forward [CopyStates]
    and Score for each piece of logits
    and between steps: Rest ─► Done, [Reread ─► Done or Failed ─► Settle], Wake ─► Done or Failed

The loss of a rank ends the engine, because a part of the model and of every sequence's cache is
lost with it. Streams continue in the engine that replaces this one.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import EngineDead, ModelLoadError
from engine.framing import encode
from engine.kv_cache.states import num_state_lines
from engine.models.modules import Modules
from engine.models.spec import DecoderSpec
from engine.parallel.board import Relay
from engine.parallel.enlisting import Enlist
from engine.parallel.fitting import fitting
from engine.parallel.frames import (
    CopyBlocks,
    CopyStates,
    Done,
    Exchange,
    Failed,
    Forward,
    FromRank,
    Join,
    LoadAdapter,
    Loaded,
    Met,
    Prepared,
    Reread,
    Rest,
    Score,
    Serve,
    Settle,
    ToRank,
    Wake,
    pack,
)
from engine.parallel.gathering import Gathering, RemoteRank
from engine.parallel.group import LOOPBACK, Group, Meeting, file_store
from engine.parallel.layers import share_modules
from engine.parallel.pipeline import Pipeline, connect
from engine.parallel.ranks import HANG_UP, LocalRank, Rank, all_said
from engine.parallel.refusals import refuse_unshared
from engine.parallel.shard import Shard
from engine.parallel.stages import stage_layers
from engine.runner.device import choose_device, choose_dtype, dtype_name
from engine.runner.images import NOTHING_SEEN, StepView
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.scratch import Scratch
from engine.types import Adapter, BlockCopy, MemoryPlan

logger = logging.getLogger(__name__)

_END_GRACE_S = 2.0
_NAMING_S = 2.0
_Expected = TypeVar("_Expected", Loaded, Prepared, Met, Done)


class Team:
    """The other ranks of a model whose rank 0 is this process.

    Args:
        config: of the engine; the others get the same, except for speculation.
        spec: of the whole model.

    Raises:
        ModelLoadError: the model cannot be sharded this way; nothing has been started then.
    """

    def __init__(self, config: EngineConfig, spec: DecoderSpec) -> None:
        refuse_unshared(config, spec)
        self.shard = Shard.of(config, 0)
        self._spec = spec
        self._num_lines = partial(num_state_lines, config)
        theirs = _of_others(config, spec)
        self._gathering = Gathering(config, partial(_invite, theirs)) if config.nodes else None
        self._directory = Scratch("ranks")
        self._fate = _Fate()
        self._ranks: list[Rank] = []
        self._said: list[Iterator[FromRank]] = []
        self._meeting = None if config.nodes else self._directory.path / "meeting"
        self._end = weakref.finalize(
            self, _end, self._ranks, self._gathering, self._fate, self._directory
        )
        self._address = LOOPBACK if self._gathering is None else self._gathering.address
        meeting = None if self._meeting is None else str(self._meeting)
        for rank in range(1, config.ranks_here):
            self._take_in([LocalRank(rank)])
            self._send(rank, encode(Join(theirs, rank, meeting, self._address)))
        self.group: Group | None = None
        self.pipeline: Pipeline | None = None
        self._block_size = 0
        self._rests = False

    def meet(self, memory: MemoryPlan, device: torch.device, dtype: torch.dtype) -> MemoryPlan:
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
        loaded = self._expect_all(Loaded, range(1, here))
        if self._gathering is not None:
            self._take_in(self._gathering.wait())
            loaded += self._expect_all(Loaded, range(here, self.shard.num_ranks))
        memory = fitting(memory, loaded, self._num_lines)
        self._block_size = memory.block_size
        self._tell(
            Serve(
                memory.num_blocks,
                memory.max_model_len,
                memory.num_host_blocks,
                memory.num_states,
                memory.num_snapshots,
            )
        )
        self._expect_all(Prepared)
        self._fate.watch(self._ranks)
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

    def share(self, modules: Modules) -> Modules:
        """Connect rank 0's modules with those of the others. Only after ``meet``."""
        if self.group is None:
            return modules
        return share_modules(modules, self._spec, self.shard, self.group, self._score)

    def on_loss(self, act: Callable[[str], None]) -> None:
        """Call ``act`` with the reason, in a thread of its own, when a rank is gone."""
        self._fate.act = act

    def close(self) -> None:
        """End the other ranks. Idempotent; also called when the team is garbage-collected."""
        self._end()

    # ------------------------------------------------------------ rests

    def rest(self, level: int) -> None:
        """Make all ranks free their caches, and weights according to the level (``Runner.rest``).

        Raises EngineDead.
        """
        self._rests = True
        self._tell(Rest(level))
        self._all_done()

    def wake(self) -> None:
        """Make all ranks allocate their caches again, if they have none.

        Raises:
            ModelLoadError: one is out of memory; call ``rest`` again then.
            EngineDead: a rank is gone.
        """
        if self._rests:
            self._tell(Wake())
            self._all_done()
            self._rests = False

    @contextlib.contextmanager
    def reading(self, model: str, generation: int) -> Iterator[None]:
        """Make the other ranks read their shards of ``model`` while the caller reads its own.

        They keep the new weights if all ranks could read theirs, else the old ones.

        Raises:
            ModelLoadError: one could not.
            EngineDead: a rank is gone.
        """
        self._tell(Reread(model, generation))
        adopts = False
        try:
            try:
                yield
            except Exception:
                with contextlib.suppress(ModelLoadError):
                    self._all_done()
                raise
            self._all_done()
            adopts = True
        finally:
            self._tell(Settle(adopts))

    # ------------------------------------------------------------ steps

    def exchange(self, offloads: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Make all ranks exchange blocks with host memory. Raises EngineDead."""
        self._tell(Exchange(*(pack(np.array(pairs, np.int32)) for pairs in (offloads, loads))))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make all ranks copy blocks. Raises EngineDead."""
        self._tell(CopyBlocks(pack(np.array(copies, np.int32))))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make all ranks copy recurrent states between lines. Raises EngineDead."""
        self._tell(CopyStates(pack(np.array(pairs, np.int32))))

    def load_adapter(self, adapter: Adapter) -> None:
        """Make all ranks load an adapter. Raises EngineDead."""
        self._tell(LoadAdapter(adapter))

    @contextlib.contextmanager
    def forward(
        self, batch: HostBatch, table: RowTable, seen: StepView = NOTHING_SEEN, *, trims: bool
    ) -> Iterator[None]:
        """Have the other ranks compute a pass while the caller computes it too.

        Args:
            batch: the rows.
            table: holds them.
            seen: the images in them.
            trims: only the last tokens of sampling rows are needed.

        Raises:
            EngineDead: a rank is gone, or the caller failed midway: the ranks are then out of step.
        """
        adapters, places = _adapters(batch, table)
        width = -(-int(batch.seq_lens.max()) // self._block_size)
        rows = pack(batch.sampling_rows) if trims else None
        tables = pack(table.host_tables[batch.slots, :width])
        where = pack(batch.query_start), pack(batch.starts), tables
        lines = pack(batch.slots) if self._spec.is_recurrent else b""
        turns = b"" if seen.turns is None else pack(seen.turns.host)
        ends = b"" if seen.ends is None else pack(seen.ends.host)
        shown, num_told = b"", 0
        if seen.tokens is not None and seen.places is not None:
            shown, num_told = pack(seen.places), len(seen.tokens.deep)
        of_images = turns, ends, shown, num_told
        self._tell(Forward(*where, rows, adapters, places, lines, *of_images))
        try:
            if seen.tokens is not None and self.group is not None:
                self.group.broadcast(torch.stack((seen.tokens.embeddings, *seen.tokens.deep)))
            yield
        except EngineDead:
            raise
        except Exception as error:
            logger.exception("a pass failed on rank 0")
            raise EngineDead(f"{type(error).__name__} in a pass that ranks share") from error

    def _score(self, num_rows: int) -> None:
        self._tell(Score(num_rows), self.shard.size)

    # ------------------------------------------------------------ helpers

    def _take_in(self, ranks: Sequence[Rank]) -> None:
        self._ranks += ranks
        self._said += map(all_said, ranks)

    def _connect(self, device: torch.device, dtype: torch.dtype) -> None:
        """Meet the others; all ranks do so at once."""
        shard, relay = self.shard, None
        if self._meeting is None:
            relay = Relay(self._ranks, self._said)
            store = relay.board
        else:
            store = file_store(self._meeting, shard.num_ranks)
        meeting = Meeting(shard, device, store, self._address, self._fate.name_lost)
        self.group, self.pipeline = connect(meeting, self._spec, dtype)
        if relay is None:
            self._expect_all(Met)
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

    def _tell(self, message: ToRank, end: int | None = None) -> None:
        """Send a message to all ranks, or to those before ``end``."""
        frame = encode(message)
        for rank in range(1, self.shard.num_ranks if end is None else end):
            self._send(rank, frame)

    def _send(self, rank: int, frame: bytes) -> None:
        to = self._ranks[rank - 1]
        try:
            to.socket.sendall(frame)
        except OSError as error:
            raise EngineDead(f"{to.name} is gone: {error.strerror}") from None

    def _expect_all(
        self, kind: type[_Expected], ranks: Iterable[int] | None = None
    ) -> list[_Expected]:
        """Return the next message of all ranks, or of ``ranks``."""
        numbers = range(1, self.shard.num_ranks) if ranks is None else ranks
        return [self._expect(number, kind) for number in numbers]

    def _all_done(self) -> None:
        """Wait until all ranks have finished their task; then raise the first failure, if any."""
        problems: list[ModelLoadError] = []
        for rank in range(1, self.shard.num_ranks):
            try:
                self._expect(rank, Done)
            except ModelLoadError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    def _expect(self, rank: int, kind: type[_Expected]) -> _Expected:
        try:
            message = next(self._said[rank - 1], None)
        except OSError:
            message = None
        if message is None:
            raise EngineDead(f"{self._ranks[rank - 1].name} ended while others waited for it")
        if isinstance(message, Failed):
            raise ModelLoadError(message.message)
        assert isinstance(message, kind)
        return message


class _Fate:
    """Watches the ranks, and acts when one is lost. It does not reference the team, so that a
    team can be garbage-collected while it is watched."""

    def __init__(self) -> None:
        self.act: Callable[[str], None] | None = None
        self._is_ending = False
        self._lost = "another"
        self._has_seen = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, ranks: Sequence[Rank]) -> None:
        """Start watching for the other end of a socket being closed."""
        self._thread = threading.Thread(
            target=self._watch, args=(ranks,), name="ranks", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Expect the sockets to be shut down, which is no loss from now on."""
        self._is_ending = True

    def name_lost(self) -> str:
        """Return the name of the lost rank. A collective can fail before that rank's socket
        shows it, so this waits for a moment; "another" if all sockets are still open after it."""
        self._has_seen.wait(_NAMING_S)
        return self._lost

    def join(self) -> None:
        """Wait until the watching thread has ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_GRACE_S)

    def _watch(self, ranks: Sequence[Rank]) -> None:
        poll = select.poll()
        names = {rank.socket.fileno(): rank.name for rank in ranks}
        for descriptor in names:
            poll.register(descriptor, HANG_UP)
        gone = poll.poll()
        if self._is_ending:
            return
        self._lost = ", ".join(names[descriptor] for descriptor, _ in gone)
        self._has_seen.set()
        logger.critical("%s ended: the model is no longer whole", self._lost)
        if self.act is not None:
            self.act(f"{self._lost} ended")


def _adapters(batch: HostBatch, table: RowTable) -> tuple[tuple[Adapter, ...], bytes]:
    """Return the distinct adapters of the rows, and each row's index among them."""
    of_rows = [table.requests[slot].adapter for slot in batch.slots.tolist()]
    if not any(of_rows):
        return (), b""
    distinct = {adapter.id: adapter for adapter in of_rows if adapter is not None}
    places = {adapter_id: place for place, adapter_id in enumerate(distinct)}
    rows = [-1 if adapter is None else places[adapter.id] for adapter in of_rows]
    return tuple(distinct.values()), pack(np.array(rows))


def _of_others(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """Return the config for the other ranks. On another machine these might choose another
    device and dtype by themselves, and they need not know the path of the secret."""
    nodes = config.nodes
    if nodes is not None:
        nodes = msgspec.structs.replace(nodes, secret_file="")
    device = choose_device(config.device)
    dtype = dtype_name(choose_dtype(config.dtype, spec.checkpoint_dtype, device))
    given = {"speculation": None, "nodes": nodes, "device": device.type, "dtype": dtype}
    return msgspec.structs.replace(config, **given)


def _invite(theirs: EngineConfig, number: int, enlist: Enlist, rank: RemoteRank) -> bytes:
    """Return the first message to a rank on another machine."""
    own = {"model": enlist.model, "num_threads": enlist.num_threads}
    config = msgspec.structs.replace(theirs, **own)
    return encode(Join(config, number, None, rank.address))


def _end(
    ranks: Sequence[Rank], gathering: Gathering | None, fate: _Fate, directory: Scratch
) -> None:
    """End all ranks and wait for them; each exits when its socket is shut down."""
    fate.end()
    if gathering is not None:
        gathering.close()
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.socket.shutdown(socket.SHUT_RDWR)
    fate.join()
    for rank in ranks:
        rank.end(_END_GRACE_S)
    directory.close()
