"""The LoRA adapters that are served, each under a model name of its own."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.client import EngineClient
from engine.errors import ModelLoadError, RequestError
from engine.lora.files import adapter_digest
from engine.types import Adapter, Request, SamplingParams
from server.adapter_table import AdapterTable, ServedAdapter
from server.errors import ApiError, bad_field
from server.named_paths import find_within


class Adapters:
    """The adapters given with ``--lora`` and those loaded since. Belongs to one event loop.

    Args:
        reserved: names of the base model.
        directory: where adapters may be loaded from at run time; None disables loading.
        table: the served adapters; several API workers may share it.
    """

    def __init__(self, reserved: list[str], directory: Path | None, table: AdapterTable) -> None:
        self._reserved = frozenset(reserved)
        self._directory = directory
        self._table = table

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._table.served.values())

    def __contains__(self, name: str) -> bool:
        return name in self._table.served

    def get(self, name: str) -> Adapter | None:
        """The adapter that is served as ``name``."""
        served = self._table.served.get(name)
        return None if served is None else served.adapter

    async def load_initial(self, engine: EngineClient, paths: Mapping[str, str]) -> None:
        """Serve the adapters given at startup, unless another worker has already done so.

        An adapter that was unloaded since does not come back when a worker is replaced.

        Args:
            engine: reads the adapters.
            paths: their directories, by name.

        Raises:
            ModelLoadError: an adapter cannot be used with this model; the message starts with its
                name.
            EngineDead: the engine is gone.
        """
        found: dict[str, ServedAdapter] = {}
        for name, path in paths.items():
            digest = adapter_digest(path)
            # All workers derive the same id, so the engine keeps one copy.
            named = f"{name}={path} {digest}".encode()
            id_ = hashlib.blake2b(named, digest_size=16).hexdigest()
            adapter = Adapter(id=id_, name=name, path=path, digest=digest)
            try:
                found[name] = await self._read(engine, adapter)
            except (RequestError, ApiError) as error:
                raise ModelLoadError(f"--lora {name}: {error}") from None
        if found:
            self._table.put(found, initial=True)

    async def load(self, engine: EngineClient, name: str, path: str) -> None:
        """Serve the adapter in the directory ``path`` as ``name``, once the engine has read it.

        A relative path works because the engine's process has this one's working directory. An
        adapter of the same name is replaced; requests already started with it finish with it.

        Raises:
            InvalidParameter: the adapter cannot be used with this model.
            ApiError: 400, the name belongs to the base model.
            EngineDead: the engine is gone.
        """
        digest = adapter_digest(path)
        adapter = Adapter(id=secrets.token_hex(16), name=name, path=path, digest=digest)
        self._table.put({name: await self._read(engine, adapter)})

    def unload(self, name: str) -> None:
        """Stop serving ``name``; requests already started go on. Raises ApiError (404)."""
        try:
            self._table.remove(name)
        except KeyError:
            raise unknown_adapter(name) from None

    async def _read(self, engine: EngineClient, adapter: Adapter) -> ServedAdapter:
        if not adapter.name or adapter.name in self._reserved:
            raise bad_field("lora_name", "is the name of the model itself")
        await _probe_all(engine, adapter)
        return ServedAdapter(adapter, int(time.time()))

    def find(self, path: str) -> Path:
        """Resolve a path within the adapters' directory to a directory that may be loaded.

        Raises:
            ApiError: 404 if loading is disabled or there is no such directory within it.
        """
        if self._directory is None:
            raise ApiError(404)
        found = find_within(self._directory, path)
        if found is None or not found.is_dir():
            raise unknown_adapter(path)
        return found


def unknown_adapter(name: str) -> ApiError:
    """The 404 for an unknown adapter."""
    message = f"There is no adapter '{name[:200]}'."
    return ApiError(404, message, param="model", code="model_not_found")


async def _probe_all(engine: EngineClient, adapter: Adapter) -> None:
    """Have every live engine read the adapter; others read it with their first request for it.

    Raises the first engine's error, in which case no engine serves the adapter.
    """
    present = [member for member in engine.members if member.alive]
    if not present:
        await _probe(engine, adapter)  # raises the reason
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
        id=f"adapter-{secrets.token_hex(16)}",  # several workers may ask for it at once
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
