"""The rendezvous of ranks reaches all of them, and so does its failure."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from engine.errors import EngineDead
from engine.framing import encode
from engine.parallel.follower import read_messages
from engine.parallel.frames import ComputeLogits, Prepared
from engine.parallel.ranks import read_rank_messages
from engine.parallel.store import FollowerStore, ReplicatedStore, StoreRelay


@dataclass
class End:
    """A rank as rank 0 sees it; ``theirs`` is the other end."""

    socket: socket.socket
    theirs: socket.socket
    name: str

    def end(self, grace_s: float) -> None:
        self.socket.close()


@pytest.fixture
def ranks():
    ends = [End(*socket.socketpair(), f"rank {number}") for number in (1, 2)]
    yield ends
    for end in ends:
        end.end(0.0)
        end.theirs.close()


def gloo(board: ReplicatedStore, rank: int) -> Any:
    """One of three ranks."""
    group: Any = distributed.ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=60)
    return group(board, rank, 3, options)


def summed(group: Any, value: float) -> float:
    x = torch.tensor([value])
    group.allreduce(x).wait()
    return x.item()


def attend(end: End) -> FollowerStore:
    return FollowerStore(
        read_messages(end.theirs), lambda message: end.theirs.sendall(encode(message))
    )


def test_every_rank_reads_what_every_rank_writes(ranks):
    relay = StoreRelay(ranks, [read_rank_messages(rank) for rank in ranks])
    others = [attend(rank) for rank in ranks]
    boards = [relay.store, *(other.store for other in others)]
    for number, board in enumerate(boards):
        board.set(f"key {number}", bytes([number]))
    for board in boards:
        assert [board.get(f"key {number}") for number in range(3)] == [b"\0", b"\1", b"\2"]
        assert board.check(["key 0", "key 2"])
        assert not board.check(["key 0", "key 3"])
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(other.finish) for other in others]
        relay.finish()
        for end in ends:
            end.result(30)


def test_ranks_meet_through_it_and_add_up(ranks):
    """It does not read frames after the rendezvous, nor does the rendezvous read earlier frames."""
    said = [read_rank_messages(rank) for rank in ranks]

    def come(number: int) -> tuple[float, object]:
        end = ranks[number - 1]
        messages = read_messages(end.theirs)
        end.theirs.sendall(encode(Prepared()))  # possibly in one segment with the rendezvous
        attendance = FollowerStore(messages, lambda message: end.theirs.sendall(encode(message)))
        group = gloo(attendance.store, number)
        attendance.finish()
        return summed(group, float(number)), next(messages)

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(come, number) for number in (1, 2)]
        assert [next(each) for each in said] == [Prepared(), Prepared()]
        relay = StoreRelay(ranks, said)
        group = gloo(relay.store, 0)
        relay.finish()
        for rank in ranks:
            rank.socket.sendall(encode(ComputeLogits(7)))
        assert summed(group, 10.0) == 13.0
        assert [other.result(30) for other in others] == [(13.0, ComputeLogits(7))] * 2


def test_a_rank_that_ends_meanwhile_is_named_to_who_waits(ranks):
    relay = StoreRelay(ranks, [read_rank_messages(rank) for rank in ranks])
    ranks[1].theirs.close()
    with pytest.raises(RuntimeError, match="rank 2 ended before it had met the others"):
        gloo(relay.store, 0)
    ranks[0].theirs.close()
    with pytest.raises(EngineDead, match="rank 2 ended before"):
        relay.finish()


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_told(ranks):
    relay = StoreRelay(ranks, [read_rank_messages(rank) for rank in ranks])
    with pytest.raises(RuntimeError, match=r"did not come to meet within 0\.05 s"):
        relay.store.wait(["key"], timedelta(seconds=0.05))


def test_a_rank_whose_rank_0_goes_does_not_wait(ranks):
    attendance = attend(ranks[0])
    ranks[0].socket.close()
    with pytest.raises(RuntimeError, match="rank 0 is gone"):
        attendance.store.get("key")
