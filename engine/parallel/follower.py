"""A rank behind the first: ``python -m engine.parallel.follower FD``, started by ``leader.py``.

``FD`` is one end of a socket pair whose other end rank 0 holds. It says what to load and then, pass
by pass, what to compute. End-of-file means that rank 0 has gone: this process then ends at once, in
the middle of a collective if need be. On another machine than rank 0's it is started by
``node.py``, which holds the other end then; rank 0 is at that of ``--leader``, and the end of
either ends it.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine import logs
from engine.child import die_with_parent
from engine.errors import EngineDead, ModelLoadError
from engine.framing import encode, receive
from engine.kv_cache.host_store import HostStore
from engine.kv_cache.states import copy_states, make_states, num_state_lines
from engine.kv_cache.storage import KVCache
from engine.lora.batch import step_adapters
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.models.recurrent import LayerState
from engine.models.spec import DecoderSpec
from engine.models.step_state import StepState
from engine.parallel.board import Attendance
from engine.parallel.frames import (
    CopyBlocks,
    CopyStates,
    Exchange,
    Failed,
    Forward,
    FromRank,
    Join,
    LoadAdapter,
    Loaded,
    Met,
    Prepared,
    RankFrames,
    Score,
    Serve,
    ToRank,
    unpack,
)
from engine.parallel.group import Meeting, file_store
from engine.parallel.layers import share_modules
from engine.parallel.pipeline import Connections, Pipeline, connect
from engine.parallel.ranks import HANG_UP
from engine.parallel.shard import Shard
from engine.runner.adapter_load import make_adapters
from engine.runner.device import divide_machine
from engine.runner.inputs import HostBatch
from engine.runner.load import LoadPlan, make_plan, plan_cache, read_weights
from engine.runner.transfer import Uploads
from engine.types import BlockCopy
from kernels.attention import BatchGeometry, DeviceGeometry
from kernels.inputs import StepRows

logger = logging.getLogger(__name__)

Send = Callable[[FromRank], None]


def main(argv: list[str] | None = None) -> int:
    """Be a rank for the process at the other end of the socket; returns the exit code."""
    parser = argparse.ArgumentParser(prog="engine.parallel.follower")
    parser.add_argument("fd", type=int, help="the rank's end of the socket pair")
    parser.add_argument("--leader", type=int, help="its connection to rank 0, if that is another")
    parser.add_argument("--die-with-parent", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.die_with_parent:
        die_with_parent()
    parent = connection = socket.socket(fileno=args.fd)
    if args.leader is not None:
        connection = socket.socket(fileno=args.leader)
    connection.setblocking(True)
    ends = parent, connection
    threading.Thread(target=_end_with, args=ends, name="lifeline", daemon=True).start()
    messages = read_messages(connection)
    join = next(messages, None)
    if not isinstance(join, Join):
        return 1
    logs.configure_engine(join.config, join.rank)
    try:
        follow(connection, join, messages)
    except EngineDead as error:
        logger.critical("%s", error)
        return 1
    except (BrokenPipeError, ConnectionResetError):
        pass  # rank 0 is gone
    except Exception:
        logger.exception("a rank failed")
        return 1
    return 0


def follow(connection: socket.socket, join: Join, messages: Iterator[ToRank]) -> None:
    """Load a share of a model and compute it, until the other end is closed.

    Args:
        connection: to rank 0.
        join: what it said first.
        messages: what it says then.

    Raises:
        EngineDead: another rank is gone.
    """

    def send(message: FromRank) -> None:
        connection.sendall(encode(message))

    shard = Shard.of(join.config, join.rank)
    try:
        follower = _load(join, shard, messages, send)
    except ModelLoadError as error:
        if join.config.nodes is not None:  # its log may be another one than rank 0's
            logger.error("%s", error)
        send(Failed(f"rank {shard.number}: {error}"))
        return
    if follower is None:
        return
    with torch.inference_mode():
        for message in messages:
            follower.obey(message)


def _load(join: Join, shard: Shard, messages: Iterator[ToRank], send: Send) -> Follower | None:
    """Read this rank's weights and meet the others; None when rank 0 has gone meanwhile."""
    config = divide_machine(join.config)
    model = read_config(config.model)
    assert isinstance(model.spec, DecoderSpec)  # rank 0 has seen to it
    plan = make_plan(config, model, model.spec, shard)
    loaded = read_weights(plan, None)
    memory = plan_cache(plan, loaded)
    send(
        Loaded(
            memory.num_blocks,
            memory.num_host_blocks,
            memory.weights_bytes,
            memory.num_states,
            memory.num_snapshots,
        )
    )
    serve = next(messages, None)
    if not isinstance(serve, Serve):
        return None
    attention = plan.attention
    num_lines = num_state_lines(config, serve.num_states, serve.num_snapshots)
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
    host = HostStore(cache.tensors(), slots) if slots else None
    send(Prepared())
    group, pipeline = _meet(join, shard, plan, messages, send)
    modules = loaded.modules
    if group is not None:
        modules = share_modules(modules, plan.spec, shard, group)
    decoder = Decoder(plan.spec, modules, plan.kernels, serve.max_model_len, group)
    return Follower(plan, shard, decoder, cache, states, host, pipeline)


def _meet(
    join: Join, shard: Shard, plan: LoadPlan, messages: Iterator[ToRank], send: Send
) -> Connections:
    attention = plan.attention
    attendance: Attendance | None = None
    if join.meeting is None:
        attendance = Attendance(messages, send)
        store = attendance.board
    else:
        store = file_store(Path(join.meeting), shard.num_ranks)
    meeting = Meeting(shard, attention.device, store, join.address)
    connections = connect(meeting, plan.spec, attention.dtype)
    if attendance is None:
        send(Met())
    else:
        attendance.finish()
    return connections


class Follower:
    """Computes what rank 0 computes, on this rank's share.

    Args:
        plan: what was decided at load.
        shard: which rank this is.
        model: this rank's, joined with the others.
        cache: its keys and values.
        states: what other layers keep.
        host: blocks in the host's memory; None: none are there.
        pipeline: the way to other stages; None: there are none.
    """

    def __init__(
        self,
        plan: LoadPlan,
        shard: Shard,
        model: Decoder,
        cache: KVCache,
        states: Sequence[LayerState],
        host: HostStore | None,
        pipeline: Pipeline | None,
    ) -> None:
        self._plan = plan
        self._shard = shard
        self._pipeline = pipeline
        self._adapters = make_adapters(plan)
        self._model = model
        self._cache = cache
        self._states = states
        self._host = host
        self._uploads = Uploads(plan.attention.device)

    def obey(self, message: ToRank) -> None:
        """Do what rank 0 does now. Raises EngineDead when another rank is gone."""
        if isinstance(message, Forward):
            self._forward(message)
        elif isinstance(message, Score):
            attention = self._plan.attention
            shape = message.num_rows, self._plan.spec.hidden_size
            self._model.logits(torch.empty(shape, dtype=attention.dtype, device=attention.device))
        elif isinstance(message, Exchange):
            assert self._host is not None
            self._host.exchange(_copies(message.offloads), _copies(message.loads))
        elif isinstance(message, CopyStates):
            lines = unpack(message.pairs).reshape(-1, 2).tolist()
            copy_states(self._states, ((source, target) for source, target in lines))
        elif isinstance(message, LoadAdapter):
            self._adapters.load(message.adapter)
        elif isinstance(message, CopyBlocks):
            pairs = unpack(message.pairs).reshape(-1, 2)
            sources, targets = self._send(pairs[:, 0].copy(), pairs[:, 1].copy())
            for layer in self._cache.paged:
                self._plan.kernels.operations.copy_blocks(layer, sources.long(), targets.long())

    def _forward(self, message: Forward) -> None:
        plan, batch = self._plan, _batch(message)
        host_tables = unpack(message.tables).reshape(batch.slots.size, -1)
        last = batch.query_start[1:][batch.sampling_rows] - 1
        of_states = unpack(message.lines) if message.lines else batch.slots
        *sent, tables, wanted, lines = self._send(
            *(batch.slots, batch.query_start, batch.starts, batch.token_ids),
            *(host_tables, last, of_states),
        )
        rows = StepRows(*sent)
        longest = int(np.diff(batch.query_start).max())
        inputs = plan.kernels.operations.build_inputs(
            rows, rows.slots.long(), tables, plan.attention.block_size, longest
        )
        on_device = DeviceGeometry(rows.query_start, inputs.seq_lens, rows.slots, tables)
        geometry = BatchGeometry(
            batch.query_start, batch.seq_lens, batch.slots, host_tables, on_device
        )
        state = StepState(
            attention=plan.kernels.attention.plan(geometry, plan.attention),
            slot_mapping=inputs.slot_mapping,
            positions=inputs.positions,
            rotations=self._model.rotations(inputs.positions),
            rows=rows._replace(slots=lines),
        )
        if message.adapters:
            state = self._adapted(state, message, batch)
        is_trimmed = message.sampling_rows is not None and self._shard.is_last_stage
        self._run(inputs.input_ids, state, wanted if is_trimmed else None)

    def _run(self, input_ids: torch.Tensor, state: StepState, wanted: torch.Tensor | None) -> None:
        """The layers that are here; the ids are rank 0's to know."""
        model, pipeline, caches = self._model, self._pipeline, self._cache.layers
        if pipeline is None:
            model.forward(input_ids, state, caches, wanted)
        elif not self._shard.stage:
            pipeline.hand_on(model.forward(input_ids, state, caches))
        else:
            x = pipeline.take(input_ids.shape[0])
            pipeline.hand_on(model.go_on(x, state, caches, wanted))

    def _adapted(self, state: StepState, message: Forward, batch: HostBatch) -> StepState:
        """The state with the adapters of its rows, in this rank's own slots."""
        found = self._adapters.slots(message.adapters)
        by_place = np.array([*(found[adapter.id] for adapter in message.adapters), -1], np.int64)
        slots = by_place[unpack(message.adapter_rows)]
        operations = self._plan.kernels.operations
        of_tokens, of_wanted = step_adapters(self._adapters, slots, batch, operations)
        return replace(state, adapters=of_tokens, wanted_adapters=of_wanted)

    def _send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return self._uploads.send(arrays)


def _batch(message: Forward) -> HostBatch:
    """The rows that rank 0 told of, each in the line of the table that it came in."""
    query_start, starts = unpack(message.query_start), unpack(message.starts)
    slots = np.arange(len(starts), dtype=np.int32)
    sampling_rows = slots if message.sampling_rows is None else unpack(message.sampling_rows)
    tokens = np.zeros(query_start[-1], np.int32)  # rank 0 has them
    return HostBatch(slots, query_start, starts, tokens, sampling_rows)


def _copies(pairs: bytes) -> list[BlockCopy]:
    return [BlockCopy(source, target) for source, target in unpack(pairs).reshape(-1, 2).tolist()]


def read_messages(connection: socket.socket) -> Iterator[ToRank]:
    """All that rank 0 says, until it has gone."""
    frames = RankFrames()
    while messages := receive(connection, frames):
        yield from messages


def _end_with(*connections: socket.socket) -> None:
    """End this process when the other end of a socket is closed, whatever it is doing."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, HANG_UP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
