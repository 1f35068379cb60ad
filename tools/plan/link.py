"""Measures what connects the ranks of a model: what a sum over them takes, as layers ask for it.

Ranks compute a little before each sum, as they do in a model: on a CPU the threads that carry a
sum then compete with what is computed, and a sum takes several times what it does by itself.
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

from engine.scratch import Scratch
from tools.plan.cost import Link
from tools.plan.errors import PlanError
from tools.plan.least_squares import non_negative

_ITEMSIZE = 2
_SIZES = {  # bytes of the all-reduces that are measured
    "cpu": tuple(2**power for power in range(11, 23)),
    "cuda": tuple(2**power for power in range(13, 28)),
}
_ROUNDS = 5
_LEAST_SIZES = 3  # that a line is laid through
_IN_A_ROW = 12
_WIDTH = 256
_PATIENCE_S = 300.0


class MeasuredLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link as all-reduces of some ranks found it."""

    link: Link
    num_ranks: int
    device: str
    median_error: float  # of the fitted times, relative, without its sign
    seconds: dict[int, float]  # of an all-reduce of so many bytes, the median


def measure_link(num_ranks: int, device: str) -> MeasuredLink:
    """Time all-reduces of so many ranks on this machine, as a model's layers call them.

    Args:
        num_ranks: processes; on a GPU each has one of its own.
        device: "cpu" or "cuda".

    Raises:
        PlanError: the ranks cannot meet.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with contextlib.closing(Scratch("link")) as directory:
        meeting = str(directory.path / "meeting")
        given = [(rank, num_ranks, device, meeting, theirs) for rank in range(num_ranks)]
        ranks = [context.Process(target=_be_rank, args=each, daemon=True) for each in given]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            if not ours.poll(_PATIENCE_S):
                raise PlanError(f"--measure-link: {num_ranks} ranks did not meet")
            told = ours.recv()
        except EOFError:
            raise PlanError(f"--measure-link: a rank of {num_ranks} has ended") from None
        finally:
            for rank in ranks:
                rank.terminate()
                rank.join()
    if isinstance(told, str):
        raise PlanError(f"--measure-link: {told}")
    if len(told) < _LEAST_SIZES:
        raise PlanError("--measure-link: the machine is too busy to tell sums from what is between")
    return fit_link(told, num_ranks, device)


def fit_link(seconds: dict[int, float], num_ranks: int, device: str) -> MeasuredLink:
    """The latency and bandwidth that come nearest to measured all-reduces, by relative errors.

    Args:
        seconds: of an all-reduce of so many bytes.
        num_ranks: that made it.
        device: that they were on.
    """
    sizes, taken = np.array([*seconds], np.float64), np.array([*seconds.values()], np.float64)
    sent = sizes * 2 * (num_ranks - 1) / num_ranks
    terms = np.stack([np.ones_like(sent), sent], 1) / taken[:, None]
    latency_s, byte_s = non_negative(terms, np.ones(len(taken)))
    link = Link(bytes_per_s=1 / max(float(byte_s), 1e-15), latency_s=float(latency_s))
    errors = [abs(link.all_reduce_s(size, num_ranks) / took - 1) for size, took in seconds.items()]
    return MeasuredLink(
        link=link,
        num_ranks=num_ranks,
        device=device,
        median_error=statistics.median(errors),
        seconds=seconds,
    )


class _Place(NamedTuple):
    rank: int
    num_ranks: int
    device: str
    meeting: str


def _be_rank(rank: int, num_ranks: int, device: str, meeting: str, tell: Connection) -> None:
    """In a process of its own: sum with the others; the first rank tells what it took."""
    try:
        found = _sum_with_others(_Place(rank, num_ranks, device, meeting))
    except Exception as error:  # whatever keeps a device or a group from being there
        tell.send(f"rank {rank}: {str(error).splitlines()[0]}")
        return
    if rank == 0:
        tell.send(found)


def _sum_with_others(place: _Place) -> dict[int, float]:
    """Seconds by bytes, medians."""
    from engine.parallel.group import Group, Meeting, file_store
    from engine.parallel.shard import Shard

    number = f":{place.rank}" if place.device == "cuda" else ""
    device = torch.device(f"{place.device}{number}")
    store = file_store(Path(place.meeting), place.num_ranks)
    group = Group(Meeting(Shard(place.rank, place.num_ranks), device, store))
    work = torch.ones(_WIDTH, _WIDTH, dtype=torch.float32, device=device)

    def take_s(x: torch.Tensor | None) -> float:
        """Seconds of a round: what a layer computes, and a sum with the others."""
        group.broadcast(torch.zeros(1, device=device))  # all begin together
        _finish(device)
        begun_s = time.perf_counter()
        for _ in range(_IN_A_ROW):
            torch.mm(work, work)
            if x is not None:
                group.all_reduce(x)
        _finish(device)
        return (time.perf_counter() - begun_s) / _IN_A_ROW

    found: dict[int, float] = {}
    for size in _SIZES[place.device]:
        x = torch.zeros(size // _ITEMSIZE, dtype=torch.bfloat16, device=device)
        # In turn, so that what disturbs the machine disturbs both.
        rounds = [(take_s(x), take_s(None)) for _ in range(_ROUNDS)]
        with_sum_s, without_s = (statistics.median(column) for column in zip(*rounds, strict=True))
        if with_sum_s > without_s:
            found[size] = with_sum_s - without_s
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
