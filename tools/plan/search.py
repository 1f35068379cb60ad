"""Which way to share a model out to devices serves some traffic with fewest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from tools.plan.answer import Prediction, Slo, greatest_rate, replicas_for
from tools.plan.errors import PlanError
from tools.plan.simulate import Replica
from tools.plan.traffic import Arrival

if TYPE_CHECKING:
    from engine.models.spec import DecoderSpec
    from tools.plan.ranks import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One way, and what came of it.

    Attributes:
        tensor_parallel_size: ranks of a stage.
        pipeline_parallel_size: stages.
        problem: why it does not do; None: it does.
        replica: an engine of so many ranks; None: there is none.
        most: what it takes within the limits.
        replicas: how many are needed for the traffic, where that is told.
        each: what each of them then does.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    problem: str | None = None
    replica: Replica | None = None
    most: Prediction | None = None
    replicas: int | None = None
    each: Prediction | None = None

    @property
    def num_ranks(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def told(self) -> dict[str, object]:
        """For programs."""
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "problem": self.problem,
            "most_rate": None if self.most is None else self.most.rate,
            "replicas": self.replicas,
            "devices": None if self.replicas is None else self.replicas * self.num_ranks,
        }


def shapes(config: EngineConfig, max_ranks: int) -> Iterator[EngineConfig]:
    """The engine with all powers of two of ranks and stages that make no more than ``max_ranks``
    ranks, few ranks first; with whole experts on ranks of one stage where it asks for them."""
    powers = [2**power for power in range(max_ranks.bit_length())]
    pairs = [(size, stages) for size in powers for stages in powers if size * stages <= max_ranks]
    for size, stages in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1])):
        yield msgspec.structs.replace(
            config,
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            enable_expert_parallel=config.enable_expert_parallel and size > 1,
        )


def try_shape(
    config: EngineConfig,
    spec: DecoderSpec,
    device: Device,
    arrivals: Sequence[Arrival],
    slo: Slo,
    rate: float | None,
    front_ms: float,
) -> Tried:
    """What an engine of these ranks takes, and how many are needed.

    Args:
        config: says how many ranks, and how they share.
        spec: of the model.
        device: of each rank.
        arrivals: the requests.
        slo: the limits.
        rate: requests a second, of all replicas; None: nobody asks how many are needed.
        front_ms: see ``predict``.
    """
    from tools.plan.ranks import replica_of

    tried = Tried(
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )
    try:
        replica = replica_of(config, spec, device)
    except (ModelLoadError, PlanError) as error:
        return replace(tried, problem=str(error))
    most = greatest_rate(replica, arrivals, slo, front_ms)
    if most is None:
        return replace(tried, problem="a request that is alone takes longer than the limits")
    if rate is None:
        return replace(tried, replica=replica, most=most)
    replicas, each = replicas_for(replica, arrivals, slo, rate, most, front_ms)
    return replace(tried, replica=replica, most=most, replicas=replicas, each=each)


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """The way that needs fewest devices, or takes most requests a second with each of them where
    nobody said how many come; of equal ones the one with fewer ranks. None where none does."""
    working = [each for each in tried if each.most is not None]
    return min(working, key=_devices_needed, default=None)


def _devices_needed(tried: Tried) -> tuple[float, int]:
    assert tried.most is not None
    if tried.replicas is not None:
        return tried.replicas * tried.num_ranks, tried.num_ranks
    return tried.num_ranks / tried.most.rate, tried.num_ranks
