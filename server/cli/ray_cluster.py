"""``quire ray``: one model on several nodes of a Ray cluster.

    quire ray ─► placement group: a bundle a machine ─► an actor each ─► quire serve --node-rank i

Ray finds the machines, reserves their GPUs, and distributes the address and the secret. Everything
else works as with ``quire serve --nnodes`` (``engine/parallel/node.py``): the actors start that
command and supervise it, so no tensor and no token passes through Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from engine import logs
from server.cli.flags import parse_settings
from server.cli.ray_node import RayNode
from server.settings import InvalidSettings, Settings

logger = logging.getLogger(__name__)

_NODE_RESOURCE = 0.001  # of Ray's resource that stands for a machine: enough to be placed there
_PLACEMENT_S = 60.0
_CALL_TIMEOUT_S = 30.0  # for actor calls that have nothing to wait for
_POLL_INTERVAL_S = 1.0
_GRACE_S = 15.0  # for the other machines to exit after the first
_RAY_MANAGED_SETTINGS = ("node_rank", "master_addr", "node_secret_file")


def main(argv: Sequence[str]) -> int:
    """Serve until node 0 exits. Returns its exit status, or 1 if there was none."""
    own, flags = _split(argv)
    try:
        settings = parse_settings(flags)
        _check(settings)
    except InvalidSettings as error:
        print(f"quire ray: {error}", file=sys.stderr)
        return 1
    import ray  # an optional extra: its absence is reported

    logs.configure(settings.log_level, settings.log_format)
    try:
        ray.init(address=own.address or "auto", configure_logging=False)
    except ConnectionError as error:
        print(f"quire ray: {_explain_no_cluster(own.address, error)}", file=sys.stderr)
        return 1
    try:
        return _Cluster(settings, flags).serve()
    except _PlacementError as error:
        print(f"quire ray: {error}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


def _split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="quire ray",
        usage="quire ray [--ray-address ADDRESS] MODEL --nnodes N [options of quire serve]",
        description="Serve one model from several machines of a Ray cluster. See docs/parallel.md.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ray-address",
        dest="address",
        help="address of the cluster (default: RAY_ADDRESS, else the local one)",
    )
    return parser.parse_known_args(argv)


def _explain_no_cluster(address: str | None, error: ConnectionError) -> str:
    """Why no cluster was joined; without an address Ray's own words name a flag of Ray's."""
    if address is None and not os.environ.get("RAY_ADDRESS"):
        return (
            "there is no Ray cluster here; start one with 'ray start --head', or name one with "
            "--ray-address or RAY_ADDRESS"
        )
    return f"there is no Ray cluster to join: {' '.join(str(error).split())}"


def _check(settings: Settings) -> None:
    """Raise InvalidSettings for settings that Ray does not support or determines itself."""
    if settings.nnodes == 1:
        raise InvalidSettings("--nnodes must be at least 2; on one machine use quire serve")
    for name in _RAY_MANAGED_SETTINGS:
        if name in settings.model_fields_set:
            raise InvalidSettings(
                f"--{name.replace('_', '-')} is chosen by Ray and cannot be set here"
            )


class _PlacementError(Exception):
    """The cluster lacks the machines; one line for the user."""


class _Cluster:
    """The nodes of one server.

    Args:
        settings: the server's settings, validated.
        flags: the flags they were parsed from.
    """

    def __init__(self, settings: Settings, flags: Sequence[str]) -> None:
        self._settings = settings
        self._flags = list(flags)
        self._secret = secrets.token_hex(32)
        self._group: Any = None
        self._nodes: list[Any] = []
        self._address = ""
        self._is_ending = False

    def serve(self) -> int:
        """Serve on all machines until the first one exits. Raises _PlacementError."""
        import ray

        with self._placement(), _on_signals(self._terminate):
            self._nodes = [self._new_node(rank) for rank in range(self._settings.nnodes)]
            self._address = ray.get(self._nodes[0].address.remote(), timeout=_PLACEMENT_S)
            for rank in range(len(self._nodes)):
                self._start(rank)
            while (status := self._poll_nodes()) is None:
                time.sleep(_POLL_INTERVAL_S)
            self._stop()
            return status

    # ------------------------------------------------------------ placement

    @contextlib.contextmanager
    def _placement(self) -> Iterator[None]:
        """Reserve a bundle of resources on each machine, the first on this one with the API."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        bundles = [{"CPU": 1.0} | self._gpus() for _ in range(self._settings.nnodes)]
        bundles[0][f"node:{ray.util.get_node_ip_address()}"] = _NODE_RESOURCE
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        try:
            if not self._group.wait(_PLACEMENT_S):
                have = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
                gpus = self._gpus().get("GPU", 0)
                raise _PlacementError(
                    f"{len(bundles)} machines with a free CPU and {gpus:.0f} free GPUs each are "
                    f"needed, this one among them; the cluster's {len(have)} have "
                    f"{', '.join(f'{count:.0f}' for count in have)} GPUs"
                )
            yield
        finally:
            remove_placement_group(self._group)

    def _gpus(self) -> dict[str, float]:
        """The GPUs that each machine's ranks need; empty if the model runs on CPUs."""
        import ray

        settings = self._settings
        if settings.device == "cpu" or not ray.cluster_resources().get("GPU"):
            return {}
        ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
        return {"GPU": float(-(-ranks // settings.nnodes))}

    def _new_node(self, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        options = {"num_cpus": 1, "num_gpus": self._gpus().get("GPU", 0)}
        return ray.remote(RayNode).options(scheduling_strategy=where, **options).remote()

    # ------------------------------------------------------------ servers

    def _start(self, rank: int) -> None:
        flags = [*self._flags, "--node-rank", str(rank), "--master-addr", self._address]
        self._nodes[rank].start.remote(flags, self._secret)

    def _poll_nodes(self) -> int | None:
        """The exit status of the first machine's server, or None while it runs.

        Restarts the servers of other machines when they have exited, on the same machine or, if
        that is lost, wherever Ray finds another.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        for rank, node in enumerate(self._nodes):
            try:
                (status,) = ray.get([node.poll.remote()], timeout=_CALL_TIMEOUT_S)
            except GetTimeoutError:
                continue  # it is still being placed
            except RayActorError:
                if rank == 0:
                    return 1
                logger.warning("node %d is lost", rank)
                self._nodes[rank] = self._new_node(rank)
                status = 1
            if status is None:
                continue
            if rank == 0:
                return status
            if not self._is_ending:
                logger.warning(
                    "node %d has ended with status %d and is started again", rank, status
                )
                self._start(rank)
        return None

    def _terminate(self) -> None:
        """Let the first machine finish its requests; on the second call, exit at once."""
        if self._is_ending:
            raise SystemExit(1)
        self._is_ending = True
        self._nodes[0].terminate.remote()

    def _stop(self) -> None:
        import ray
        from ray.exceptions import RayError

        self._is_ending = True
        with contextlib.suppress(RayError):
            ray.get([node.stop.remote(_GRACE_S) for node in self._nodes], timeout=2 * _GRACE_S)


@contextlib.contextmanager
def _on_signals(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` on SIGTERM and SIGINT."""

    def handle(number: int, frame: FrameType | None) -> None:
        act()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
