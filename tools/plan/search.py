"""Searches for the parallel layout that serves some traffic with the fewest devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from tools.plan.errors import PlanError
from tools.plan.predict import Prediction, Slo, find_max_rate, replicas_for
from tools.plan.simulate import Replica
from tools.plan.traffic import Arrival

if TYPE_CHECKING:
    from engine.models.spec import DecoderSpec
    from tools.plan.ranks import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """One parallel layout and its result.

    Attributes:
        tensor_parallel_size: ranks per stage.
        pipeline_parallel_size: stages.
        problem: why the layout does not work; None: it does.
        replica: an engine with these ranks; None: there is none.
        at_max_rate: its performance at the greatest rate within the limits.
        replicas: how many the traffic needs, if a rate is given.
        each: the performance of each of them.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    problem: str | None = None
    replica: Replica | None = None
    at_max_rate: Prediction | None = None
    replicas: int | None = None
    each: Prediction | None = None

    @property
    def num_ranks(self) -> int:
        """The devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def as_json(self) -> dict[str, object]:
        """The result as a JSON object."""
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "problem": self.problem,
            "most_rate": None if self.at_max_rate is None else self.at_max_rate.rate,
            "replicas": self.replicas,
            "devices": None if self.replicas is None else self.replicas * self.num_ranks,
        }


def layouts(config: EngineConfig, max_ranks: int) -> Iterator[EngineConfig]:
    """Configs with power-of-two ranks and stages, up to ``max_ranks`` in all, fewest first.

    With expert parallelism, the ranks of one stage hold whole experts.
    """
    powers = [2**power for power in range(max_ranks.bit_length())]
    pairs = [(size, stages) for size in powers for stages in powers if size * stages <= max_ranks]
    for size, stages in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1])):
        yield msgspec.structs.replace(
            config,
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            enable_expert_parallel=config.enable_expert_parallel and size > 1,
        )


def evaluate_layout(
    config: EngineConfig,
    spec: DecoderSpec,
    device: Device,
    arrivals: Sequence[Arrival],
    slo: Slo,
    rate: float | None,
    front_ms: float,
) -> LayoutResult:
    """Find the greatest rate of an engine with these ranks, and how many replicas are needed.

    Args:
        config: the engine's config, with its ranks.
        spec: the model.
        device: the device of each rank.
        arrivals: the requests.
        slo: the limits.
        rate: requests per second, over all replicas; None: do not compute the replicas needed.
        front_ms: see ``predict``.
    """
    from tools.plan.ranks import replica_of

    tried = LayoutResult(
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )
    try:
        replica = replica_of(config, spec, device)
    except (ModelLoadError, PlanError) as error:
        return replace(tried, problem=str(error))
    most = find_max_rate(replica, arrivals, slo, front_ms)
    if most is None:
        return replace(tried, problem="a request that is alone takes longer than the limits")
    if rate is None:
        return replace(tried, replica=replica, at_max_rate=most)
    replicas, each = replicas_for(replica, arrivals, slo, rate, most, front_ms)
    return replace(tried, replica=replica, at_max_rate=most, replicas=replicas, each=each)


def best_of(tried: Sequence[LayoutResult]) -> LayoutResult | None:
    """The working layout that needs the fewest devices; None if there is none.

    Without a given rate, the one with the most requests per second and device. Ties go to the
    layout with fewer ranks.
    """
    working = [each for each in tried if each.at_max_rate is not None]
    return min(working, key=_devices_needed, default=None)


def _devices_needed(tried: LayoutResult) -> tuple[float, int]:
    assert tried.at_max_rate is not None
    if tried.replicas is not None:
        return tried.replicas * tried.num_ranks, tried.num_ranks
    return tried.num_ranks / tried.at_max_rate.rate, tried.num_ranks
