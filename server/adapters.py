"""The LoRA adapters that are served: by name, each as a model of its own."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.client import EngineClient
from engine.errors import ModelLoadError, RequestError
from engine.types import Adapter, Request, SamplingParams
from server.adapter_table import AdapterTable, Served
from server.errors import ApiError, bad_field
from server.named_paths import find_within


class Adapters:
    """What ``--lora`` named and what was loaded since. Belongs to one event loop.

    Args:
        reserved: names of the model itself.
        directory: where adapters may be loaded from at run time; None: nowhere.
        table: of those that are served, which several API workers may share.
    """

    def __init__(self, reserved: list[str], directory: Path | None, table: AdapterTable) -> None:
        self._reserved = frozenset(reserved)
        self._directory = directory
        self._table = table

    def __iter__(self) -> Iterator[Served]:
        return iter(self._table.served.values())

    def __contains__(self, name: str) -> bool:
        return name in self._table.served

    def get(self, name: str) -> Adapter | None:
        """The adapter that is served as ``name``."""
        served = self._table.served.get(name)
        return None if served is None else served.adapter

    async def begin(self, engine: EngineClient, paths: Mapping[str, str]) -> None:
        """Serve what a server starts with, unless another worker has done so before: what was
        unloaded since does not come back with a worker that is replaced.

        Args:
            engine: reads them.
            paths: of their directories, by name.

        Raises:
            ModelLoadError: one cannot be used with this model; its name comes first.
            EngineDead: the engine is gone.
        """
        found: dict[str, Served] = {}
        for name, path in paths.items():
            # Workers give it the same id, so that the engine keeps it once.
            id_ = hashlib.blake2b(f"{name}={path}".encode(), digest_size=16).hexdigest()
            try:
                found[name] = await self._read(engine, Adapter(id=id_, name=name, path=path))
            except (RequestError, ApiError) as error:
                raise ModelLoadError(f"--lora {name}: {error}") from None
        if found:
            self._table.put(found, first=True)

    async def load(self, engine: EngineClient, name: str, path: str) -> None:
        """Serve the adapter in the directory ``path`` as ``name``, once the engine has read it; the
        engine's process has this one's working directory.

        One of the same name makes way; requests that have begun with it end with it.

        Raises:
            InvalidParameter: it cannot be used with this model.
            ApiError: 400, the name is the model's own.
            EngineDead: the engine is gone.
        """
        adapter = Adapter(id=secrets.token_hex(16), name=name, path=path)
        self._table.put({name: await self._read(engine, adapter)})

    def unload(self, name: str) -> None:
        """Serve ``name`` no longer; requests that have begun go on. Raises ApiError (404)."""
        try:
            self._table.remove(name)
        except KeyError:
            raise unknown_adapter(name) from None

    async def _read(self, engine: EngineClient, adapter: Adapter) -> Served:
        if not adapter.name or adapter.name in self._reserved:
            raise bad_field("lora_name", "is the name of the model itself")
        await _probe_all(engine, adapter)
        return Served(adapter, int(time.time()))

    def find(self, path: str) -> Path:
        """A directory that may be loaded at run time, by its path in the adapters' directory.

        Raises:
            ApiError: 404 where loading is off, or it is no directory within that one.
        """
        if self._directory is None:
            raise ApiError(404)
        found = find_within(self._directory, path)
        if found is None or not found.is_dir():
            raise unknown_adapter(path)
        return found


def unknown_adapter(name: str) -> ApiError:
    """The 404 for an adapter that is not there."""
    message = f"There is no adapter '{name[:200]}'."
    return ApiError(404, message, param="model", code="model_not_found")


async def _probe_all(engine: EngineClient, adapter: Adapter) -> None:
    """Have every engine that is there read the adapter; one that is not reads it with its first
    request. Raises what any of them says, and then it is served by none.
    """
    present = [member for member in engine.members if member.alive]
    if not present:
        await _probe(engine, adapter)  # which says why not
        return
    waits = [asyncio.create_task(_probe(member, adapter)) for member in present]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _probe(engine: EngineClient, adapter: Adapter) -> None:
    """Have the engine read the adapter and compute a token with it."""
    request = Request(
        id=f"adapter-{secrets.token_hex(16)}",  # workers may ask for the same one at once
        prompt_token_ids=(0,),
        sampling=SamplingParams(temperature=0, max_tokens=1, seed=0),
        adapter=adapter,
        arrival_s=time.monotonic(),
    )
    (stream,) = engine.submit([request])
    try:
        while (await stream.next()).finish_reason is None:
            pass
    finally:
        stream.abort()
