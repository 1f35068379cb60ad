"""Measures the interconnect between ranks: the time of an all-reduce, as layers use it.

Ranks compute a little before each all-reduce, as they do in a model: on a CPU the communication
threads compete with the computation, so an all-reduce takes several times as long as it would
alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from engine.scratch import ScratchDirectory
from tools.plan.cost import Link
from tools.plan.errors import PlanError
from tools.plan.least_squares import solve_non_negative

_ITEMSIZE = 2
_SIZES = {  # bytes of the measured all-reduces
    "cpu": tuple(2**power for power in range(11, 23)),
    "cuda": tuple(2**power for power in range(13, 28)),
}
_ROUNDS = 5
_MIN_SIZES = 3  # minimum number of points for the line fit
_CALLS_PER_ROUND = 12
_WIDTH = 256
_TIMEOUT_S = 300.0


class MeasuredLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link, fitted to measured all-reduces."""

    link: Link
    num_ranks: int
    device: str
    median_error: float  # absolute relative error of the fitted times
    seconds: dict[int, float]  # median time of an all-reduce, by bytes


def measure_link(num_ranks: int, device: str) -> MeasuredLink:
    """Time all-reduces between ``num_ranks`` ranks on this machine, as a model's layers call them.

    Args:
        num_ranks: the number of processes; on a GPU machine each has its own GPU.
        device: "cpu" or "cuda".

    Raises:
        PlanError: the ranks cannot connect.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with contextlib.closing(ScratchDirectory("link")) as directory:
        meeting = str(directory.path / "meeting")
        given = [(rank, num_ranks, device, meeting, theirs) for rank in range(num_ranks)]
        ranks = [context.Process(target=_run_rank, args=each, daemon=True) for each in given]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            if not ours.poll(_TIMEOUT_S):
                raise PlanError(f"--measure-link: {num_ranks} ranks did not meet")
            reply = ours.recv()
        except EOFError:
            raise PlanError(f"--measure-link: a rank of {num_ranks} has ended") from None
        finally:
            for rank in ranks:
                rank.terminate()
                rank.join()
    if isinstance(reply, str):
        raise PlanError(f"--measure-link: {reply}")
    if len(reply) < _MIN_SIZES:
        raise PlanError("--measure-link: the machine is too busy to tell sums from what is between")
    return fit_link(reply, num_ranks, device)


def fit_link(seconds: dict[int, float], num_ranks: int, device: str) -> MeasuredLink:
    """Fit latency and bandwidth to measured all-reduces, minimising relative errors.

    Args:
        seconds: the time of an all-reduce, by bytes.
        num_ranks: the number of ranks that took part.
        device: the device they were on.
    """
    sizes, taken = np.array([*seconds], np.float64), np.array([*seconds.values()], np.float64)
    sent = sizes * 2 * (num_ranks - 1) / num_ranks
    terms = np.stack([np.ones_like(sent), sent], 1) / taken[:, None]
    latency_s, byte_s = solve_non_negative(terms, np.ones(len(taken)))
    link = Link(bytes_per_s=1 / max(float(byte_s), 1e-15), latency_s=float(latency_s))
    errors = [abs(link.all_reduce_s(size, num_ranks) / took - 1) for size, took in seconds.items()]
    return MeasuredLink(
        link=link,
        num_ranks=num_ranks,
        device=device,
        median_error=statistics.median(errors),
        seconds=seconds,
    )


class _RankArgs(NamedTuple):
    rank: int
    num_ranks: int
    device: str
    store_path: str


def _run_rank(rank: int, num_ranks: int, device: str, meeting: str, tell: Connection) -> None:
    """Run one rank in its own process; the first rank sends the measured times."""
    try:
        found = _time_all_reduces(_RankArgs(rank, num_ranks, device, meeting))
    except Exception as error:  # whatever makes a device or a group unavailable
        tell.send(f"rank {rank}: {str(error).splitlines()[0]}")
        return
    if rank == 0:
        tell.send(found)


def _time_all_reduces(place: _RankArgs) -> dict[int, float]:
    """The median seconds, by bytes."""
    from engine.parallel.group import Group, Rendezvous, file_store
    from engine.parallel.shard import Shard

    number = f":{place.rank}" if place.device == "cuda" else ""
    device = torch.device(f"{place.device}{number}")
    store = file_store(Path(place.store_path), place.num_ranks)
    group = Group(Rendezvous(Shard(place.rank, place.num_ranks), device, store))
    work = torch.ones(_WIDTH, _WIDTH, dtype=torch.float32, device=device)

    def take_s(x: torch.Tensor | None) -> float:
        """The mean seconds of a layer's computation and, with ``x``, an all-reduce."""
        group.broadcast(torch.zeros(1, device=device))  # start together
        _finish(device)
        begun_s = time.perf_counter()
        for _ in range(_CALLS_PER_ROUND):
            torch.mm(work, work)
            if x is not None:
                group.all_reduce(x)
        _finish(device)
        return (time.perf_counter() - begun_s) / _CALLS_PER_ROUND

    found: dict[int, float] = {}
    for size in _SIZES[place.device]:
        x = torch.zeros(size // _ITEMSIZE, dtype=torch.bfloat16, device=device)
        # Alternate, so that disturbances of the machine affect both.
        rounds = [(take_s(x), take_s(None)) for _ in range(_ROUNDS)]
        with_sum_s, without_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        if with_sum_s > without_s:
            found[size] = with_sum_s - without_s
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
