"""The collectives of a group of ranks: NCCL between GPUs, gloo between processes on CPUs.

Ranks of one machine find each other through a file in a directory of rank 0's own and talk over the
loopback interface, so nothing listens for other machines; those of several find each other through
``board.py``, and talk over the addresses by which rank 0 knows them. Every call waits at most
``TIMEOUT_S`` for the other ranks; what fails means that one of them is gone, and with it the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from engine.errors import EngineDead
from engine.parallel.shard import Shard

TIMEOUT_S = 300.0
MEETING_TIMEOUT_S = 60.0  # all have loaded by then
LOOPBACK = "127.0.0.1"


class Group:
    """One rank's end (see :class:`engine.models.peers.Peers`). Made by all ranks at once.

    Args:
        shard: which rank this is, of how many.
        device: where tensors are.
        store: through which ranks find each other, a ``torch.distributed.Store``.
        address: of this machine, where this rank's end of gloo's connections is.
        timeout_s: how long a call waits for the others.
        name_lost: says who is gone when a call has failed; a rank that cannot know says "another".

    Raises:
        EngineDead: here and by every method, when another rank is gone.
    """

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        store: Any,
        address: str = LOOPBACK,
        timeout_s: float = TIMEOUT_S,
        name_lost: Callable[[], str] = lambda: "another",
    ) -> None:
        self._shard = shard
        self._name_lost = name_lost
        timeout = timedelta(seconds=timeout_s)
        make = _nccl if device.type == "cuda" else _gloo
        self._group: Any = None
        self._group = self._translated(lambda: make(shard, store, address, timeout))
        self.all_reduce(torch.zeros(1, device=device))  # NCCL meets with the first call

    @property
    def rank(self) -> int:
        """This rank's number; 0 has the scheduler."""
        return self._shard.rank

    @property
    def size(self) -> int:
        """See ``Peers``."""
        return self._shard.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Peers``."""
        x = x.contiguous()
        self._translated(lambda: self._group.allreduce(x).wait())
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has in ``x``, which is overwritten on the others."""
        x = x.contiguous()
        self._translated(lambda: self._group.broadcast(x, 0).wait())
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 what each rank has in ``x``, all of one shape; nothing on the others."""
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        into = [found] if found else []
        self._translated(lambda: self._group.gather(into, [x], options).wait())
        return found

    def _translated(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
            raise EngineDead(f"rank {self.rank} has lost {self._name_lost()}: {reason}") from error


def file_store(path: Path, size: int) -> Any:
    """A store for ranks of one machine: a file that does not exist yet, the same for all."""
    torch_distributed: Any = distributed  # its stubs hide the class
    store = torch_distributed.FileStore(str(path), size)
    store.set_timeout(timedelta(seconds=MEETING_TIMEOUT_S))
    return store


def _gloo(shard: Shard, store: Any, address: str, timeout: timedelta) -> Any:
    group: Any = distributed.ProcessGroupGloo  # its stubs know no options
    options = group._Options()
    options._devices = [group.create_device(hostname=address)]
    options._timeout = timeout
    return group(store, shard.rank, shard.size, options)


def _nccl(shard: Shard, store: Any, address: str, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in builds of torch for CPUs

    if address == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # to meet; data goes over NVLink or PCIe
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, shard.rank, shard.size, options)
