"""Tensors in which a layer's experts lie one after the other, read as one tensor for each expert.

The name tables (``rules.py``) give every expert a name of its own: with ``moe.up_proj.{e}.weight``,
the tensor ``moe.up_proj.weight`` of a file is cut along its first dimension. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from engine.models.safetensors import Header, TensorEntry


def split_experts(headers: list[Header], names: Collection[str], num_experts: int) -> list[Header]:
    """Return the headers with an entry for each expert in place of the tensors of all.

    Args:
        headers: of a checkpoint's files.
        names: those that the model's tables have places for.
        num_experts: of a layer. A tensor that cannot be cut into so many is left as it is.
    """
    return [
        replace(
            header,
            entries={
                part.name: part
                for entry in header.entries.values()
                for part in _parts(entry, names, num_experts)
            },
        )
        for header in headers
    ]


def _parts(entry: TensorEntry, names: Collection[str], count: int) -> Iterator[TensorEntry]:
    stem, _, last = entry.name.rpartition(".")
    # A weight's scales have no places of their own.
    is_split = f"{stem}.0.{last}" in names or f"{stem}.0.weight" in names
    if not is_split or not entry.shape or entry.shape[0] % count:
        yield entry
        return
    rows, size = entry.shape[0] // count, entry.num_bytes // count
    shape = entry.shape[1:] if len(entry.shape) > 2 else (rows, *entry.shape[1:])
    for e in range(count):
        begin = entry.begin + e * size
        yield replace(entry, name=f"{stem}.{e}.{last}", shape=shape, begin=begin, num_bytes=size)
