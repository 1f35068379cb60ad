"""Names and patterns of modules in an untrusted ``quantization_config``.

Patterns are regular expressions, and matching may take practically forever: ``(a+)+$``. They are
compiled and matched in a process that is killed after some seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Self

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.sandbox.process import SandboxedProcess

_HANDLER = Path(__file__).with_name("match_worker.py")
_LIMIT_S = 5.0  # for all patterns and modules
_PREFIX = "re:"


class ModuleNames:
    """A list of modules: whole names, and patterns for prefixes of names.

    Args:
        words: of the list; patterns begin with ``re:``.
        where: file and key of the list, for messages.
    """

    def __init__(self, words: Iterable[str], where: str) -> None:
        words = tuple(words)
        self._names = frozenset(word for word in words if not word.startswith(_PREFIX))
        self._patterns = [word[len(_PREFIX) :] for word in words if word.startswith(_PREFIX)]
        self._where = where

    @classmethod
    def read(cls, reader: ConfigReader, key: str) -> Self:
        """Read the list under a config key. Raises ModelLoadError if it is not of strings."""
        return cls(reader.texts(key), str(reader.error(key, "")).strip())

    def __contains__(self, name: str) -> bool:
        """Return whether the list has exactly this name or class of modules."""
        return name in self._names

    def matching(self, modules: Iterable[str]) -> frozenset[str]:
        """Return the modules that the list matches.

        Raises:
            ModelLoadError: a pattern is invalid or takes too long; one line that names the key.
        """
        modules = list(modules)
        named = self._names.intersection(modules)
        return named | self._match(modules) if self._patterns and modules else named

    def _match(self, modules: list[str]) -> set[str]:
        with closing(SandboxedProcess(_HANDLER, (), {}, limit_s=_LIMIT_S)) as process:
            try:
                reply = process.call({"patterns": self._patterns, "names": modules})
            except TimeoutError:
                raise self._refused(f"take more than {_LIMIT_S:g} s to match") from None
            except (OSError, UnicodeEncodeError) as error:
                raise self._refused(f"cannot be matched: {error}") from None
        if "invalid" in reply:
            pattern = _PREFIX + reply["invalid"]
            raise ModelLoadError(f"{self._where} has the pattern {pattern[:80]!r}, which is none")
        if "matched" not in reply:
            raise self._refused("take too much memory to match")
        return set(reply["matched"])

    def _refused(self, why: str) -> ModelLoadError:
        first = self._patterns[0][:80]
        others = f" and {len(self._patterns) - 1} more" if len(self._patterns) > 1 else ""
        return ModelLoadError(f"{self._where} has patterns that {why} ({first!r}{others})")
