"""Read sentence-transformers' files: how a model's hidden states become one vector.

modules.json          the steps: the transformer, pooling, perhaps normalisation
1_Pooling/config.json which hidden states are taken
sentence_bert_config.json   the longest input the model was made for
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelLoadError
from engine.models.json_file import parse_json, parse_object, read_bytes
from engine.pooling import PoolingKind

_MODES: dict[str, PoolingKind] = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How a directory's model pools."""

    kind: PoolingKind | None = None  # None: not specified
    normalize: bool = True
    max_tokens: int | None = None  # the longest input


def read_sentence_config(directory: Path) -> SentenceConfig:
    """Read the files above; missing information has the usual defaults.

    Raises:
        ModelLoadError: a file is damaged, or contains a step that is not supported.
    """
    longest = _read_max_tokens(directory)
    path = directory / "modules.json"
    if not path.is_file():
        return SentenceConfig(max_tokens=longest)
    modules = parse_json(path, read_bytes(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path}: not a list of modules")
    kind: PoolingKind | None = None
    normalize = False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _read_pooling(directory, str(module.get("path", "")))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise ModelLoadError(f"{path}: a module of type {name[:80]!r} is not supported")
    return SentenceConfig(kind, normalize, longest)


def _read_pooling(directory: Path, name: str) -> PoolingKind:
    if Path(name).name != name:
        raise ModelLoadError(f"{directory / 'modules.json'}: {name!r:.80} is not a directory in it")
    path = directory / name / "config.json"
    config = parse_object(path, read_bytes(path))
    named = config.get("pooling_mode")  # newer versions: one or several names
    if named is None:
        prefix = "pooling_mode_"
        chosen = [key for key, on in config.items() if key.startswith(prefix) and on is True]
        named = [key.removeprefix(prefix) for key in chosen]
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or len(modes) != 1 or str(modes[0]) not in _MODES:
        raise ModelLoadError(
            f"{path}: pooling by {modes!r:.80} is not supported (known: one of cls, mean, max, "
            "lasttoken)"
        )
    return _MODES[str(modes[0])]


def _read_max_tokens(directory: Path) -> int | None:
    path = directory / "sentence_bert_config.json"
    if not path.is_file():
        return None
    value = parse_object(path, read_bytes(path)).get("max_seq_length")
    return value if type(value) is int and value > 0 else None
