"""Check that the machines that serve one model agree on the program's versions, on the settings
they were given, and on the model's files, of which each machine reads its own copy.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.file_digest import file_digest
from engine.gguf.file import find_gguf

# Settings that are each machine's own, or that only rank 0 reads.
_PER_NODE_SETTINGS = (
    "model",
    "tokenizer",
    "num_threads",
    "log_level",
    "log_format",
    "profile_dir",
    "speculation",
)
_PER_NODE_NODES_SETTINGS = ("rank", "secret_file", "timeout_s", "master_addr", "master_port")


class NodeFingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What one machine would serve."""

    versions: dict[str, str]
    settings: dict[str, str]  # JSON by field name of ``EngineConfig``
    files: dict[str, str]  # digests by name


def fingerprint_node(config: EngineConfig, defaults: EngineConfig | None = None) -> NodeFingerprint:
    """Describe what a machine would serve.

    Args:
        config: of its engine.
        defaults: defaults; settings equal to these were not given, and need not agree with the
            others.

    Raises:
        ModelLoadError: the directory holds several models.
        OSError: a file cannot be read.
    """
    settings = _flat(config)
    if defaults is not None:
        default = _flat(defaults)
        settings = {name: value for name, value in settings.items() if default.get(name) != value}
    versions = {name: _version(name) for name in ("quire", "torch")}
    return NodeFingerprint(versions, settings, _digests(config))


def find_mismatch(ours: NodeFingerprint, theirs: NodeFingerprint, node: int) -> str | None:
    """Return the first difference between node 0 and another node as one readable line; None if
    none.

    Args:
        ours: of node 0, with all settings.
        theirs: of the other.
        node: its number.
    """
    for name, version in ours.versions.items():
        if theirs.versions.get(name) != version:
            there = theirs.versions.get(name)
            return f"{name} is {there} on node {node}, and {version} on node 0"
    for name, value in theirs.settings.items():
        if ours.settings.get(name) != value:
            here = ours.settings.get(name, "unknown")
            return f"{name} is {value} on node {node}, and {here} on node 0"
    for name in sorted({*ours.files, *theirs.files}):
        if name not in theirs.files:
            return f"the model has no {name} on node {node}, and has one on node 0"
        if name not in ours.files:
            return f"the model has a {name} on node {node}, and has none on node 0"
        if ours.files[name] != theirs.files[name]:
            return f"the model's {name} on node {node} is not that on node 0"
    return None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unreleased"  # running from a source tree


def _flat(config: EngineConfig) -> dict[str, str]:
    """Return the settings that ranks share as JSON; nested ones are named ``part.name``."""
    fields: dict[str, Any] = {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name not in _PER_NODE_SETTINGS
    }
    nodes = fields.get("nodes")
    if nodes is not None:
        fields["nodes"] = {
            name: nodes[name] for name in nodes if name not in _PER_NODE_NODES_SETTINGS
        }
    flat: dict[str, str] = {}
    for name, value in fields.items():
        parts = value if isinstance(value, dict) else None
        if parts is None:
            flat[name] = json.dumps(value)
        else:
            flat |= {f"{name}.{part}": json.dumps(parts[part]) for part in parts}
    return flat


def _digests(config: EngineConfig) -> dict[str, str]:
    """Return digests of the files that ranks read: the whole config, and samples of the weights."""
    gguf = find_gguf(config.model)
    if gguf is not None:
        return {"GGUF file": file_digest(gguf)}
    directory = Path(config.model)
    pattern = "*.bin" if config.load_format == "bin" else "*.safetensors"
    weights = [] if config.load_format == "dummy" else sorted(directory.glob(pattern))
    return {path.name: file_digest(path) for path in (directory / "config.json", *weights)}
