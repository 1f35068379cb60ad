"""Rank 0's side: starts the other ranks, tells them what to compute, and notices when one is gone.

    start ─► Join ─► (all read their weights) ─► Loaded ─► Serve ─► Prepared ─► (all meet) ─► Met
    (those of other machines come by themselves: ``gathering.py``; they meet through ``board.py``)
    then, for each pass: [Exchange] [CopyStates] [CopyBlocks] Forward [CopyStates]
    and Score for each piece of logits
    and between steps: Rest ─► Done, [Reread ─► Done or Failed ─► Settle], Wake ─► Done or Failed

A rank that is gone is the end of the engine: a part of the model and of every text's cache went
with it. Streams go on in the engine that replaces this one.
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
    """The other ranks of a model whose rank 0 is here.

    Args:
        config: of the engine; the others are told the same, but of no speculation.
        spec: of the whole model.

    Raises:
        ModelLoadError: the model cannot be shared out so; nothing has been started then.
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
        """Wait until all ranks have their weights, and join them.

        Args:
            memory: what this rank has room for.
            device: of this rank.
            dtype: of hidden states.

        Returns:
            The plan that every rank has room for.

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
        if device.type == "cpu":  # NCCL looks at the file now and then
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
        """Rank 0's parameters, joined with those of the others. Only after ``meet``."""
        if self.group is None:
            return modules
        return share_modules(modules, self._spec, self.shard, self.group, self._score)

    def on_loss(self, act: Callable[[str], None]) -> None:
        """Have ``act`` called with the reason, in a thread of its own, when a rank is gone."""
        self._fate.act = act

    def close(self) -> None:
        """End the other ranks. Idempotent; done by itself when nothing refers to the team."""
        self._end()

    # ------------------------------------------------------------ rests

    def rest(self, level: int) -> None:
        """All ranks give their caches back, and of their weights what ``Runner.rest`` says of the
        level. Raises EngineDead."""
        self._rests = True
        self._tell(Rest(level))
        self._all_done()

    def wake(self) -> None:
        """All ranks have caches again, unless they have them.

        Raises:
            ModelLoadError: one has no memory for it; then they are to ``rest`` again.
            EngineDead: a rank is gone.
        """
        if self._rests:
            self._tell(Wake())
            self._all_done()
            self._rests = False

    @contextlib.contextmanager
    def reading(self, model: str, generation: int) -> Iterator[None]:
        """The other ranks read their shares of the weights in ``model`` while the caller reads its
        own; they keep them where all could read theirs, and those they had where not.

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
        """All ranks exchange blocks with the host's memory. Raises EngineDead."""
        self._tell(Exchange(*(pack(np.array(pairs, np.int32)) for pairs in (offloads, loads))))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """All ranks copy blocks. Raises EngineDead."""
        self._tell(CopyBlocks(pack(np.array(copies, np.int32))))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All ranks copy states, from line to line. Raises EngineDead."""
        self._tell(CopyStates(pack(np.array(pairs, np.int32))))

    def load_adapter(self, adapter: Adapter) -> None:
        """All ranks have an adapter ready. Raises EngineDead."""
        self._tell(LoadAdapter(adapter))

    @contextlib.contextmanager
    def forward(
        self, batch: HostBatch, table: RowTable, seen: StepView = NOTHING_SEEN, *, trims: bool
    ) -> Iterator[None]:
        """The other ranks compute a pass while the caller computes it too.

        Args:
            batch: the rows.
            table: knows them.
            seen: of images in them.
            trims: only the last tokens of sampling rows are wanted.

        Raises:
            EngineDead: a rank is gone, or this one failed in between: then the others cannot be
                brought back to where it is.
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
        """Meet the others; all do at once."""
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
        """How the model is shared out, for people."""
        shard, parts = self.shard, ["tensor parallel"] if self.shard.size > 1 else []
        if shard.num_stages > 1:
            runs = stage_layers(self._spec, shard.num_stages)
            layers = ", ".join(str(end - begin) for begin, end in runs)
            parts.append(f"pipeline parallel in {shard.num_stages} stages of {layers} layers")
        return ", ".join(parts)

    def _tell(self, message: ToRank, end: int | None = None) -> None:
        """Say something to all ranks, or to those before ``end``."""
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
        """What all ranks say, or these."""
        numbers = range(1, self.shard.num_ranks) if ranks is None else ranks
        return [self._expect(number, kind) for number in numbers]

    def _all_done(self) -> None:
        """Wait until all have done what they were asked. Raises as the first one that could not,
        once all have told."""
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
    """Whether the ranks are to live, and what happens when one does not. It knows no team, so that
    a team can be let go of while it is watched."""

    def __init__(self) -> None:
        self.act: Callable[[str], None] | None = None
        self._is_ending = False
        self._lost = "another"
        self._has_seen = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, ranks: Sequence[Rank]) -> None:
        """From now on, be there when the other end of a socket is closed."""
        self._thread = threading.Thread(
            target=self._watch, args=(ranks,), name="ranks", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """The sockets are about to be shut down, and that is no loss."""
        self._is_ending = True

    def name_lost(self) -> str:
        """Who is gone. A collective can fail before the socket of that rank has told of it, so
        this waits for a moment; "another" where all sockets are whole after it."""
        self._has_seen.wait(_NAMING_S)
        return self._lost

    def join(self) -> None:
        """Wait until nobody looks at the sockets any more."""
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
    """The distinct adapters of the rows, and each row's place among them."""
    of_rows = [table.requests[slot].adapter for slot in batch.slots.tolist()]
    if not any(of_rows):
        return (), b""
    distinct = {adapter.id: adapter for adapter in of_rows if adapter is not None}
    places = {adapter_id: place for place, adapter_id in enumerate(distinct)}
    rows = [-1 if adapter is None else places[adapter.id] for adapter in of_rows]
    return tuple(distinct.values()), pack(np.array(rows))


def _of_others(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """What ranks other than this one are told. On another machine they would not find the same
    device and dtype by themselves, nor are they to know where the secret lies."""
    nodes = config.nodes
    if nodes is not None:
        nodes = msgspec.structs.replace(nodes, secret_file="")
    device = choose_device(config.device)
    dtype = dtype_name(choose_dtype(config.dtype, spec.checkpoint_dtype, device))
    given = {"speculation": None, "nodes": nodes, "device": device.type, "dtype": dtype}
    return msgspec.structs.replace(config, **given)


def _invite(theirs: EngineConfig, number: int, enlist: Enlist, rank: RemoteRank) -> bytes:
    """What a rank of another machine is told first."""
    own = {"model": enlist.model, "num_threads": enlist.num_threads}
    config = msgspec.structs.replace(theirs, **own)
    return encode(Join(config, number, None, rank.address))


def _end(
    ranks: Sequence[Rank], gathering: Gathering | None, fate: _Fate, directory: Scratch
) -> None:
    """End all ranks and wait for them; each ends at once when its socket is shut down."""
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
