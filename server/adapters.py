"""The LoRA adapters that are served: by name, each as a model of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.client import EngineClient
from engine.types import Adapter, Request, SamplingParams
from server.errors import ApiError, bad_field


@dataclass(frozen=True)
class Served:
    """An adapter under its name."""

    adapter: Adapter
    created: int  # Unix time at which it was loaded


class Adapters:
    """What ``--lora`` named and what was loaded since. Belongs to one event loop.

    Args:
        reserved: names of the model itself.
        directory: where adapters may be loaded from at run time; None: nowhere.
    """

    def __init__(self, reserved: list[str], directory: Path | None) -> None:
        self._reserved = frozenset(reserved)
        self._directory = directory
        self._served: dict[str, Served] = {}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def __contains__(self, name: str) -> bool:
        return name in self._served

    def get(self, name: str) -> Adapter | None:
        """The adapter that is served as ``name``."""
        served = self._served.get(name)
        return None if served is None else served.adapter

    async def load(self, engine: EngineClient, name: str, path: str) -> None:
        """Serve the adapter in the directory ``path`` as ``name``, once the engine has read it; the
        engine's process has this one's working directory.

        One of the same name makes way; requests that have begun with it end with it.

        Raises:
            InvalidParameter: it cannot be used with this model.
            ApiError: 400, the name is the model's own.
            EngineDead: the engine is gone.
        """
        if not name or name in self._reserved:
            raise bad_field("lora_name", "is the name of the model itself")
        adapter = Adapter(id=secrets.token_hex(16), name=name, path=path)
        await _probe(engine, adapter)
        self._served[name] = Served(adapter, int(time.time()))

    def unload(self, name: str) -> None:
        """Serve ``name`` no longer; requests that have begun go on. Raises ApiError (404)."""
        if name not in self._served:
            raise unknown_adapter(name)
        del self._served[name]

    def find(self, path: str) -> Path:
        """A directory that may be loaded at run time, by its path in the adapters' directory.

        Raises:
            ApiError: 404 where loading is off, or it is no directory within that one.
        """
        if self._directory is None:
            raise ApiError(404)
        root = self._directory.resolve()
        try:
            found = (root / path).resolve()
            if found.is_relative_to(root) and found.is_dir():
                return found
        except (OSError, ValueError):  # too long, or with a NUL
            pass
        raise unknown_adapter(path)


def unknown_adapter(name: str) -> ApiError:
    """The 404 for an adapter that is not there."""
    message = f"There is no adapter '{name[:200]}'."
    return ApiError(404, message, param="model", code="model_not_found")


async def _probe(engine: EngineClient, adapter: Adapter) -> None:
    """Have the engine read the adapter and compute a token with it."""
    request = Request(
        id=f"adapter-{adapter.id}",
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
