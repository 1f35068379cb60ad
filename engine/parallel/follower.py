"""A follower rank: ``python -m engine.parallel.follower FD``, started by ``leader.py``.

``FD`` is one end of a socket pair whose other end rank 0 holds. Rank 0 sends what to load and then,
pass by pass, what to compute. End-of-file means that rank 0 is gone: this process then exits at
once, if need be in the middle of a collective. On other machines it is started by ``node.py``,
which holds the other end; ``--leader`` is then the connection to rank 0, and the end of either
socket ends the process.
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
from collections.abc import Callable, Iterator
from pathlib import Path

from engine import logs
from engine.child import die_with_parent
from engine.errors import EngineDead, ModelLoadError
from engine.framing import encode, receive
from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec
from engine.parallel.follower_worker import FollowerWorker, LoadedShard, allocate_caches
from engine.parallel.frames import (
    AllocateCache,
    Failed,
    FromRank,
    Join,
    Loaded,
    Prepared,
    RendezvousDone,
    ToRank,
    ToRankReader,
)
from engine.parallel.group import Rendezvous, file_store
from engine.parallel.pipeline import Connections, connect
from engine.parallel.ranks import HANG_UP
from engine.parallel.shard import Shard
from engine.parallel.store import FollowerStore
from engine.runner.device import divide_machine
from engine.runner.load import plan_cache, read_weights
from engine.runner.load_plan import LoadPlan, make_plan

logger = logging.getLogger(__name__)

Send = Callable[[FromRank], None]


def main(argv: list[str] | None = None) -> int:
    """Run a rank for the process at the other end of the socket; return the exit code."""
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
    threading.Thread(target=_exit_with, args=ends, name="lifeline", daemon=True).start()
    messages = read_messages(connection)
    join = next(messages, None)
    if not isinstance(join, Join):
        return 1
    logs.configure_engine(join.config, join.rank)
    try:
        run_follower(connection, join, messages)
    except EngineDead as error:
        logger.critical("%s", error)
        return 1
    except (BrokenPipeError, ConnectionResetError):
        pass  # rank 0 is gone
    except Exception:
        logger.exception("a rank failed")
        return 1
    return 0


def run_follower(connection: socket.socket, join: Join, messages: Iterator[ToRank]) -> None:
    """Load a shard of a model and compute on it, until the other end is closed.

    Args:
        connection: to rank 0.
        join: its first message.
        messages: its later messages.

    Raises:
        EngineDead: another rank is gone.
    """

    def send(message: FromRank) -> None:
        connection.sendall(encode(message))

    shard = Shard.of(join.config, join.rank)
    try:
        seat = _load(join, shard, messages, send)
    except ModelLoadError as error:
        if join.config.nodes is not None:  # the log may be separate from rank 0's
            logger.error("%s", error)
        send(Failed(f"rank {shard.number}: {error}"))
        return
    if seat is None:
        return
    for message in messages:
        answer = seat.handle(message)
        if answer is not None:
            send(answer)


def _load(
    join: Join, shard: Shard, messages: Iterator[ToRank], send: Send
) -> FollowerWorker | None:
    """Read this rank's weights and meet the others; None if rank 0 is gone by then."""
    config = divide_machine(join.config)
    model = read_config(config.model)
    assert isinstance(model.spec, DecoderSpec)  # checked by rank 0
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
            plan.captures_steps,
        )
    )
    serve = next(messages, None)
    if not isinstance(serve, AllocateCache):
        return None
    room = allocate_caches(plan, serve)
    send(Prepared())
    return FollowerWorker(
        shard,
        serve,
        _rendezvous(join, shard, plan, messages, send),
        LoadedShard(plan, loaded),
        room,
    )


def _rendezvous(
    join: Join, shard: Shard, plan: LoadPlan, messages: Iterator[ToRank], send: Send
) -> Connections:
    attention = plan.attention
    attendance: FollowerStore | None = None
    if join.rendezvous_file is None:
        attendance = FollowerStore(messages, send)
        store = attendance.store
    else:
        store = file_store(Path(join.rendezvous_file), shard.num_ranks)
    meeting = Rendezvous(shard, attention.device, store, join.address)
    connections = connect(meeting, plan.spec, attention.dtype)
    if attendance is None:
        send(RendezvousDone())
    else:
        attendance.finish()
    return connections


def read_messages(connection: socket.socket) -> Iterator[ToRank]:
    """Yield all messages of rank 0 until it is gone."""
    frames = ToRankReader()
    while messages := receive(connection, frames):
        yield from messages


def _exit_with(*connections: socket.socket) -> None:
    """Exit this process when the other end of a socket is closed, whatever it is doing."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, HANG_UP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
