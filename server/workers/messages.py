"""The messages between supervisor and API workers; ``engine/framing.py`` has their encoding."""

from __future__ import annotations

import msgspec

from engine.frames import Fatal
from engine.framing import Framing
from server.metrics import MetricValues


class Setup(msgspec.Struct, frozen=True, tag="setup", array_like=True):
    """To a worker, as the first message."""

    settings: str  # JSON
    engines: tuple[str, ...]  # paths of the Unix sockets on which they accept clients
    lost_engines: tuple[int, ...]  # numbers of the engines that are gone for good
    directory: str  # of the files shared by the workers
    index: int  # the worker's index, from 0


class MetricsRequest(msgspec.Struct, frozen=True, tag="metrics_request", array_like=True):
    """To a worker: request for its metrics."""


class WorkerMetrics(msgspec.Struct, frozen=True, tag="worker_metrics", array_like=True):
    """From a worker: its own metrics."""

    values: MetricValues


class GatherRequest(msgspec.Struct, frozen=True, tag="gather_request", array_like=True):
    """From a worker that is being scraped: request for the metrics of all workers."""


class GatheredMetrics(msgspec.Struct, frozen=True, tag="gathered_metrics", array_like=True):
    """To that worker: the sum over all workers, including those that have ended."""

    values: MetricValues


class EngineLost(msgspec.Struct, frozen=True, tag="engine_lost", array_like=True):
    """To a worker: one of several engines is gone for good."""

    engine: int
    message: str


# Fatal, to a worker: the engine is gone for good. From a worker: it cannot serve, and neither could
# its replacement.
Message = (
    Setup | MetricsRequest | WorkerMetrics | GatherRequest | GatheredMetrics | EngineLost | Fatal
)

_decoder = msgspec.msgpack.Decoder(Message)


class MessageReader(Framing[Message]):
    """Reads the messages above."""

    def __init__(self) -> None:
        super().__init__(_decoder)
