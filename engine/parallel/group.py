"""Tensor exchange between ranks: NCCL between GPUs, gloo between processes on CPUs.

Ranks on one machine find each other through a file in a directory of rank 0's, and communicate over
the loopback interface, so nothing listens for other machines. Ranks on several machines find each
other through ``store.py``, and communicate over the addresses by which rank 0 knows them. Every
call waits at most ``TIMEOUT_S`` for the other ranks; a failure means that one of them is gone, and
the model with it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from engine.errors import EngineDead
from engine.parallel.shard import Shard

TIMEOUT_S = 300.0
RENDEZVOUS_TIMEOUT_S = 60.0  # all have loaded by then
LOOPBACK = "127.0.0.1"


class Rendezvous(NamedTuple):
    """What a rank needs in order to meet the others."""

    shard: Shard  # this rank's
    device: torch.device  # of its tensors
    store: Any  # a ``torch.distributed.Store`` shared by all ranks
    address: str = LOOPBACK  # this machine's, for gloo connections
    # Names the lost rank after a failed call; ranks that cannot know say "another".
    name_lost: Callable[[], str] = lambda: "another"


class _ProcessGroup:
    """A set of ranks that have met, which all of them do at once.

    Args:
        rendezvous: of this rank.
        name: of the set, unique to it.
        place: this rank's number in the set.
        count: size of the set.

    Raises:
        EngineDead: here and by every method, when another rank is gone.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, place: int, count: int) -> None:
        self._number = rendezvous.shard.number
        self._name_lost = rendezvous.name_lost
        self._place, self._count = place, count
        make = _nccl if rendezvous.device.type == "cuda" else _gloo
        torch_distributed: Any = distributed  # the stubs hide this class
        store = torch_distributed.PrefixStore(name, rendezvous.store)
        self._group: Any = None
        self._group = self._checked(lambda: make(store, rendezvous.address, place, count))

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            lost, reason = self._name_lost(), str(error).splitlines()[0][:200]
            raise EngineDead(f"rank {self._number} has lost {lost}: {reason}") from error


class Group(_ProcessGroup):
    """The ranks that share each layer (see :class:`engine.models.peers.Peers`), of one stage."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        shard = rendezvous.shard
        super().__init__(rendezvous, f"stage-{shard.stage}", shard.rank, shard.size)
        self.all_reduce(torch.zeros(1, device=rendezvous.device))  # NCCL connects in the first call

    @property
    def rank(self) -> int:
        """This rank's number in the group; logits are gathered on rank 0."""
        return self._place

    @property
    def size(self) -> int:
        """See ``Peers``."""
        return self._count

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Peers``."""
        x = x.contiguous()
        self._run(self._group.allreduce, [x], distributed.AllreduceOptions())
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first rank's ``x``; it is overwritten on the others."""
        x = x.contiguous()
        self._run(self._group.broadcast, [x], distributed.BroadcastOptions())
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``x``, all of one shape, on the first rank; nothing on the others."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        into = [found] if found else []
        self._run(self._group.gather, into, [x], options)
        return found

    def _run(self, collective: Callable[..., Any], *given: Any) -> None:
        """Run a collective, whose options come last, on the current stream, which may be captured;
        on a CPU, wait for it."""
        *_, options = given
        options.asyncOp = False  # else NCCL computes on a stream of its own

        def run() -> None:
            work = collective(*given)
            if work is not None:
                work.wait()

        self._checked(run)


class Link(_ProcessGroup):
    """An ordered, one-way channel for tensors between two ranks.

    Args:
        rendezvous: of this rank.
        name: of the channel.
        is_sender: this rank is the sender.
        max_in_flight: tensors in flight; the sender waits when there are more.
    """

    def __init__(
        self, rendezvous: Rendezvous, name: str, *, is_sender: bool, max_in_flight: int
    ) -> None:
        super().__init__(rendezvous, name, 0 if is_sender else 1, 2)
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()  # keeps sent tensors alive
        hello = torch.zeros(1, device=rendezvous.device)  # NCCL connects in the first call
        if is_sender:
            self.send(hello)
        else:
            self.receive(hello)

    def send(self, x: torch.Tensor) -> None:
        """Send ``x``, which must not be written afterwards."""
        x = x.contiguous()
        self._in_flight.append((self._checked(lambda: self._group.send([x], 1, 0)), x))
        while len(self._in_flight) > self._max_in_flight:
            oldest, _ = self._in_flight.popleft()
            self._checked(oldest.wait)

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """Wait for the next tensor, with the shape and dtype of ``into``."""
        self._checked(lambda: self._group.recv([into], 0, 0).wait())
        return into


def file_store(path: Path, num_ranks: int) -> Any:
    """Return a store for ranks on one machine: a file that does not exist yet, the same for all."""
    torch_distributed: Any = distributed  # the stubs hide this class
    store = torch_distributed.FileStore(str(path), num_ranks)
    store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
    return store


def _gloo(store: Any, address: str, place: int, count: int) -> Any:
    group: Any = distributed.ProcessGroupGloo  # the stubs lack its options
    options = group._Options()
    options._devices = [group.create_device(hostname=address)]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return group(store, place, count, options)


def _nccl(store: Any, address: str, place: int, count: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in CPU builds of torch

    if address == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # to meet; data goes over NVLink or PCIe
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return ProcessGroupNCCL(store, place, count, options)
