"""The LoRA adapters that an offline ``LLM`` has used, by directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from engine.argument_types import show
from engine.errors import InvalidParameter, ModelLoadError
from engine.lora.files import CONFIG, WEIGHTS
from engine.model_source import is_hub_name, resolve_adapter
from engine.types import Adapter

Lora = str | Path  # a directory as PEFT saves it


class OfflineAdapters:
    """Registers adapters when first named; changed files are registered as a new adapter."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], Adapter] = {}
        self._downloaded: dict[str, str] = {}  # directories, by the names on the Hub

    def each(self, lora: Lora | Sequence[Lora | None] | None, count: int) -> list[Adapter | None]:
        """The adapters of ``count`` prompts: one for all of them, or one or None for each.

        Raises:
            InvalidParameter: there are too many or too few, or a directory holds no adapter.
        """
        if isinstance(lora, str) or not isinstance(lora, Sequence):
            return [self.get(lora)] * count
        if len(lora) != count:
            raise InvalidParameter(f"{count} prompts but {len(lora)} adapters", param="lora")
        return [self.get(directory) for directory in lora]

    def get(self, lora: Lora | None) -> Adapter | None:
        """The adapter in a directory, or of a name on the Hub.

        Raises InvalidParameter if there is none.
        """
        if lora is None:
            return None
        if not isinstance(lora, str | Path):
            problem = f"an adapter is the path of a directory, not {show(lora)}"
            raise InvalidParameter(problem, param="lora")
        path = os.path.realpath(self._directory_of(str(lora)))
        try:
            found = [os.stat(os.path.join(path, name)) for name in (CONFIG, WEIGHTS)]
        except (OSError, ValueError):
            raise InvalidParameter(f"there is no adapter in {str(lora)!r}", param="lora") from None
        key = path, tuple(number for each in found for number in (each.st_mtime_ns, each.st_size))
        if key not in self._known:
            self._known[key] = Adapter(secrets.token_hex(16), Path(path).name, path)
        return self._known[key]

    def _directory_of(self, lora: str) -> str:
        if os.path.exists(lora) or not is_hub_name(lora):
            return lora
        if lora not in self._downloaded:
            try:
                self._downloaded[lora] = resolve_adapter(lora, lambda *_: None)
            except ModelLoadError as error:
                raise InvalidParameter(str(error), param="lora") from None
        return self._downloaded[lora]
