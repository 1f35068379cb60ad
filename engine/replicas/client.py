"""Several engines behind one client: requests are distributed, and survive an engine's death."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from engine.client import EngineClient, LoadProgress, RequestStream
from engine.errors import EngineAsleep, EngineDead, EngineError, RequestFailed
from engine.frames import Activity
from engine.kv_cache.prefix import PrefixChain
from engine.process import SubprocessClient
from engine.replicas.coordinator import ReplicaCoordinator
from engine.replicas.router import Router
from engine.replicas.startup import start_all
from engine.shared import SharedClient
from engine.snapshot import Snapshot
from engine.stats import EngineStats
from engine.streams import Stream
from engine.types import EngineInfo, EngineOutput, Request, Trace

Replica = SubprocessClient | SharedClient

_MAX_REMEMBERED_BLOCKS = 1 << 16  # per engine: some 10 MB
# The activity reported for several engines: the first of these that any of them has.
_ACTIVITY_ORDER: tuple[Activity, ...] = (
    "serving",
    "reloading",
    "waking",
    "falling_asleep",
    "asleep",
)


class ReplicaClient:
    """A :class:`engine.client.EngineClient` for several engines that serve the same model.

    Requests go to the engine chosen by :class:`~engine.replicas.router.Router`, all continuations
    of one prompt to the same one. When an engine dies, its streams resume on the others at once, or
    on its successor if there is no other. Sleep, reload and profiles apply to all engines
    (``engine/replicas/coordinator.py``).

    Several API processes may share the engines, with a client like this in each. Since each
    balances its own requests, so do all together, but a client does not know the prefixes sent by
    others.

    Args:
        replicas: clients that have not been started.
        prefix_caching: whether the engines cache prefixes, so that the choice of engine matters.
    """

    def __init__(self, replicas: Sequence[Replica], *, prefix_caching: bool = True) -> None:
        self._replicas = tuple(replicas)
        self._prefix_caching = prefix_caching
        self._router = Router(len(self._replicas), 1, 0)  # replaced once they are loaded
        self._key = secrets.token_bytes(16)
        self._block_size = 0  # tokens per digest; 0: no digests
        self._orphans: list[_Orphan] = []  # streams without an engine
        self._coordinator = ReplicaCoordinator(self._replicas)
        self._infos: tuple[EngineInfo, ...] = ()  # those that ``_info`` was made from
        self._info: EngineInfo | None = None
        self._closed = False
        for index, replica in enumerate(self._replicas):
            replica.on_change(partial(self._on_change, index))

    # ------------------------------------------------------------ properties

    @property
    def members(self) -> Sequence[EngineClient]:
        """The engines behind it, by number."""
        return self._replicas

    @property
    def info(self) -> EngineInfo:
        """A description of the newest engine's model, with the context that all can serve."""
        infos = tuple(replica.info for replica in self._remaining_replicas())
        known = self._infos
        if self._info is None or [*map(id, infos)] != [*map(id, known)]:
            newest = max(infos, key=lambda info: info.generation)
            longest = min(info.max_model_len for info in infos)
            self._infos = infos
            self._info = msgspec.structs.replace(newest, max_model_len=longest)
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The total of running and waiting requests; see ``members`` for the rest."""
        stats = [replica.stats for replica in self._replicas]
        return EngineStats(
            num_running=sum(one.num_running for one in stats),
            num_waiting=sum(one.num_waiting for one in stats),
        )

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted now, to at least one engine."""
        return any(replica.alive for replica in self._replicas)

    @property
    def responsive(self) -> bool:
        """Whether at least one engine process answers."""
        return any(replica.alive and replica.responsive for replica in self._replicas)

    @property
    def activity(self) -> Activity:
        """The engines' activity; serving as long as one of them serves."""
        seen = {replica.activity for replica in self._replicas if replica.alive}
        for activity in _ACTIVITY_ORDER:
            if activity in seen:
                return activity
        return "serving"

    @property
    def dead(self) -> bool:
        """Whether all engines have been given up."""
        return all(replica.dead for replica in self._replicas)

    def on_output(self, listener: Callable[[EngineOutput], None]) -> None:
        """Call ``listener`` with each output of every engine."""
        for replica in self._replicas:
            replica.on_output(listener)

    # ------------------------------------------------------------ life cycle

    def spawn(self) -> None:
        """Start all child processes now, so that they load in the background."""
        for replica in self._replicas:
            if isinstance(replica, SubprocessClient):
                replica.spawn()

    async def start(self, on_progress: LoadProgress | None = None) -> EngineInfo:
        """Wait until all engines have loaded. Raises ModelLoadError or EngineDead if one cannot.

        Engines that another process has started and given up, even meanwhile, are skipped.
        """
        starts = [partial(self._start, replica) for replica in self._remaining_replicas()]
        await start_all(starts, on_progress)
        self._set_up_router()
        return self.info

    async def _start(self, replica: Replica, on_progress: LoadProgress) -> None:
        try:
            await replica.start(on_progress)
        except EngineDead:
            if self.dead or not isinstance(replica, SharedClient):
                raise

    async def close(self) -> None:
        """Shut all engines down. Live requests raise EngineDead. Idempotent."""
        self._closed = True
        self._fail_orphans(EngineDead("the engines were closed"))
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def _set_up_router(self) -> None:
        infos = [replica.info for replica in self._remaining_replicas()]
        memory = infos[0].memory
        if not self._prefix_caching or infos[0].unchunked_prefill:
            return
        most = min([_MAX_REMEMBERED_BLOCKS, *(info.memory.num_blocks for info in infos)])
        self._block_size = memory.block_size
        self._router = Router(len(self._replicas), memory.block_size, most)

    # ------------------------------------------------------------ requests

    def submit(self, requests: Sequence[Request]) -> list[RequestStream]:
        """Queue each request on the engine that the router chooses.

        Raises:
            EngineDead: no engine is alive.
            ValueError: an id is in use on any engine; nothing was queued.
        """
        for replica in self._replicas:  # streams may move from any to any
            replica.check_ids(requests)
        homes = self._place(requests, self._candidates())
        streams: dict[str, RequestStream] = {}
        for index in set(homes):
            share = [
                request for request, home in zip(requests, homes, strict=True) if home == index
            ]
            for stream in self._replicas[index].submit(share):
                streams[stream.request_id] = stream
        return [streams[request.id] for request in requests]

    def _candidates(self) -> list[int]:
        """The engines to choose from. Raises EngineDead if none is alive.

        Those that serve; otherwise those that hold requests during a reload, or still take what has
        begun; otherwise all that are alive, which will say why they refuse.
        """
        alive = [index for index, replica in enumerate(self._replicas) if replica.alive]
        if not alive:
            raise EngineDead("all engines are being restarted")
        responding = [index for index in alive if self._replicas[index].responsive]
        for found in (
            self._with_activity("serving", responding),
            self._with_activity("serving", alive),
            self._with_activity("reloading", alive),
            self._with_activity("falling_asleep", alive),
        ):
            if found:
                return found
        return alive

    def _with_activity(self, activity: Activity, among: Iterable[int]) -> list[int]:
        return [index for index in among if self._replicas[index].activity == activity]

    def _place(self, requests: Sequence[Request], among: Sequence[int]) -> list[int]:
        """Choose an engine for each request; forks go to their leader's, to share its blocks."""
        if len(among) == 1:
            for request in requests:
                if request.fork_of is None:
                    self._router.record_prompt(among[0], self._digests(request))
            return [among[0]] * len(requests)
        loads = {index: self._replicas[index].num_tokens for index in among}
        homes: list[int] = []
        of_leader: dict[str, int] = {}
        for request in requests:
            leader = request.fork_of or request.id
            home = of_leader.get(leader)
            if home is None:
                home = of_leader[leader] = self._router.route(self._digests(request), loads)
                loads[home] += len(request.prompt_token_ids)
            homes.append(home)
        return homes

    def _digests(self, request: Request) -> list[bytes]:
        size, prompt = self._block_size, request.prompt_token_ids
        if not size:
            return []
        adapter = request.adapter.id if request.adapter is not None else ""
        chain = PrefixChain(self._key, request.cache_salt, size, adapter, request.media)
        return chain.digests(prompt, len(prompt) // size)

    # ------------------------------------------------------------ deaths

    def _on_change(self, index: int) -> None:
        """Handle an engine that has died, returned or changed its activity."""
        if self._closed:
            return
        replica = self._replicas[index]
        if not replica.alive:
            self._router.forget(index)
            if streams := replica.release_streams():
                weights = replica.info.fingerprint
                self._orphans += [_Orphan(stream, weights) for stream in streams]
        elif replica.activity != "serving":
            self._router.forget(index)  # it will return with an empty cache
        self._place_orphans()
        self._coordinator.notify_change()

    def _place_orphans(self) -> None:
        """Resume streams where possible, keep those that must wait, and fail the others."""
        orphans = [orphan for orphan in self._orphans if not orphan.stream.aborted]
        self._orphans = []
        if self.dead:
            self._orphans = orphans
            self._fail_orphans(EngineDead("the engines keep dying"))
            return
        open_ = self._with_activity(
            "serving", (i for i, one in enumerate(self._replicas) if one.alive)
        )
        for weights in dict.fromkeys(orphan.weights for orphan in orphans):
            group = [orphan for orphan in orphans if orphan.weights == weights]
            same = [i for i in open_ if self._replicas[i].info.fingerprint == weights]
            self._move([o.stream for o in group if not o.stream.has_output], same or open_)
            self._move([o.stream for o in group if o.stream.has_output], same)
            self._orphans += [
                orphan for orphan in group if not (same or (open_ and not orphan.stream.has_output))
            ]
        if self._orphans and self._is_stable:
            asleep = EngineAsleep("The server is asleep; it must be woken first.")
            other = RequestFailed("the weights it was begun with are not served any more")
            self._fail_orphans(asleep if self.activity == "asleep" else other)

    def _move(self, streams: Sequence[Stream], among: Sequence[int]) -> None:
        if not streams or not among:
            return
        homes = self._place([stream.request for stream in streams], among)
        for index in dict.fromkeys(homes):
            share = [stream for stream, home in zip(streams, homes, strict=True) if home == index]
            self._replicas[index].resume_streams(share)

    def _fail_orphans(self, error: EngineError) -> None:
        orphans, self._orphans = self._orphans, []
        for orphan in orphans:
            orphan.stream.fail(error)

    @property
    def _is_stable(self) -> bool:
        """Whether no engine is in transition."""
        return all(
            one.dead or (one.alive and one.activity in ("serving", "asleep"))
            for one in self._replicas
        )

    def _remaining_replicas(self) -> Sequence[Replica]:
        """The engines that have not been given up, or all if all have."""
        return [one for one in self._replicas if not one.dead] or self._replicas

    # ------------------------------------------------------------ operations on all engines

    async def start_profile(self, num_steps: int) -> None:
        """Record the next steps of each engine that is alive."""
        await self._coordinator.start_profile(num_steps)

    async def stop_profile(self) -> Trace:
        """Stop recording; returns the traces of all engines that have one."""
        return await self._coordinator.stop_profile()

    async def snapshot(self) -> Snapshot:
        """A snapshot of the first engine that is alive; ask ``members`` for the others."""
        for replica in self._replicas:
            if replica.alive:
                return await replica.snapshot()
        raise EngineDead("all engines are being restarted")

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Put all engines to sleep; if one fails, none sleeps."""
        await self._coordinator.sleep(level, timeout_s)

    async def wake(self) -> None:
        """Wake all engines; if one fails, all stay asleep."""
        await self._coordinator.wake()

    async def reload(self, model: str | None, timeout_s: float) -> EngineInfo:
        """Replace the weights of all engines; if one fails, all keep the old ones."""
        await self._coordinator.reload(model, timeout_s)
        return self.info


def make_client(
    replicas: Sequence[Replica], *, prefix_caching: bool = True
) -> SubprocessClient | SharedClient | ReplicaClient:
    """The client for these engines; for a single one, its own."""
    return (
        replicas[0]
        if len(replicas) == 1
        else ReplicaClient(replicas, prefix_caching=prefix_caching)
    )


class _Orphan(msgspec.Struct, frozen=True):
    """A stream whose engine has died."""

    stream: Stream
    weights: str  # fingerprint of the weights that it started with
