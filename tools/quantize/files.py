"""Writes safetensors files from tensors, or by joining parts of other files.

Uses only ``open`` and ``write``, so that a full disk raises an OSError that names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

_COPY_BYTES = 16 * 2**20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorLocation(NamedTuple):
    """A tensor's location in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    begin: int  # offset of its bytes in the file
    num_bytes: int


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file atomically."""
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    table = [(name, t.dtype, tuple(t.shape), t.nbytes) for name, t in held.items()]
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(_header(table))
        for tensor in held.values():
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def concatenate(path: Path, pieces: Iterable[TensorLocation]) -> None:
    """Write a file of tensors copied from other files, a few MiB at a time."""
    pieces = list(pieces)
    table = [(piece.name, piece.dtype, piece.shape, piece.num_bytes) for piece in pieces]
    with path.open("wb") as target:
        target.write(_header(table))
        for piece in pieces:
            with piece.path.open("rb") as source:
                source.seek(piece.begin)
                left = piece.num_bytes
                while left:
                    data = source.read(min(left, _COPY_BYTES))
                    if not data:
                        raise OSError(None, "has become shorter", str(piece.path))
                    target.write(data)
                    left -= len(data)
        target.flush()
        os.fsync(target.fileno())


def write_shards(directory: Path, parts: list[list[TensorLocation]], max_bytes: int) -> int:
    """Write a model's tensors, in shards if they exceed ``max_bytes``, with an index.

    Each shard holds a run of parts that fits (at least one part).

    Returns:
        The size of all tensors, in bytes.
    """
    shards: list[list[TensorLocation]] = [[]]
    size = 0
    for part in parts:
        num_bytes = sum(piece.num_bytes for piece in part)
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1] += part
        size += num_bytes
    total = sum(piece.num_bytes for shard in shards for piece in shard)
    if len(shards) == 1:
        concatenate(directory / "model.safetensors", shards[0])
        return total
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        concatenate(directory / name, shard)
        index |= {piece.name: name for piece in shard}
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    text = json.dumps(table, indent=2) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, "utf-8")
    return total


def read_part(path: Path) -> list[TensorLocation]:
    """Read the table of a file written by ``write_tensors``.

    Raises:
        OSError: the file cannot be read, or is damaged.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            table = json.loads(file.read(length))
        except ValueError:
            raise OSError(None, "is damaged; remove the unfinished run", str(path)) from None
    del table["__metadata__"]
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    return [
        TensorLocation(
            name,
            dtypes[entry["dtype"]],
            tuple(entry["shape"]),
            path,
            8 + length + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in table.items()
    ]


def _header(table: list[tuple[str, torch.dtype, tuple[int, ...], int]]) -> bytes:
    """Length and table of contents, padded so that the tensors are aligned to eight bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape, num_bytes in table:
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, begin + num_bytes],
        }
        begin += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
