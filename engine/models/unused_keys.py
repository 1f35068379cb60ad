"""Config keys that Hugging Face's implementation of a model does not read.

Published configs carry keys of other frameworks, of training, or of features that the model does
not use. What the implementation that a model was published for never reads cannot change its
answers. The installed one is searched as text: importing it would take longer than loading.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Code that all models share.
_SHARED = (
    *("configuration_utils.py", "modeling_utils.py", "modeling_rope_utils.py"),
    *("masking_utils.py", "cache_utils.py"),
)


class _Code(NamedTuple):
    """The code of a model."""

    configuration: str  # mentions each key that it has
    others: str  # read keys as attributes, or by their names

    def may_read(self, key: str) -> bool:
        name = re.escape(key)
        mentioned = re.search(rf"\b{name}\b", self.configuration)
        return bool(mentioned or re.search(rf"[.\"']{name}\b", self.others))


def unused_keys(model_type: str, keys: Iterable[str]) -> set[str]:
    """Return those of the keys that the model's implementation does not read.

    None are if there is no implementation of this type, which the types of nested configs extend
    (``gemma3_text``).
    """
    wanted = set(keys)
    code = _code(model_type.replace("-", "_")) if wanted else None
    return set() if code is None else {key for key in wanted if not code.may_read(key)}


@cache
def _code(model_type: str) -> _Code | None:
    """Return the code of a model; None if there is none."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return None
    root = Path(found.origin).parent
    folders = {folder.name: folder for folder in (root / "models").iterdir()}
    own = [name for name in folders if f"{model_type}_".startswith(f"{name}_")]
    if not own:
        return None
    package = folders[max(own, key=len)]
    modeling, shared = package.glob("modeling_*.py"), (root / name for name in _SHARED)
    return _Code(_joined(package.glob("configuration_*.py")), _joined([*modeling, *shared]))


def _joined(files: Iterable[Path]) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
