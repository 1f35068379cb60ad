"""Read safetensors files without trusting their contents.

    8 bytes: header length N, little-endian ── N bytes: JSON ── the tensors' bytes

The header is validated before anything is allocated. Tensors are read through a buffer of a few MiB
to their destination, so loading takes no more memory than the weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.errors import ModelLoadError
from engine.lfs_pointer import refuse_lfs_pointer
from kernels.cpu.memory import mapped_zeros

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_STAGING_BYTES = 8 * 2**20
_MAX_DIMS = 8

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    # Codes of quantised weights, or tensors that are not weights.
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; ``begin`` is a byte offset from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's validated table of tensors."""

    path: Path
    entries: dict[str, TensorEntry]
    raw: bytes  # as in the file
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read and check a file's header.

    Raises:
        ModelLoadError: the file cannot be opened, is truncated, or its tensors do not cover it
            without gaps; one line that names the file.
    """
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise _damaged(path, "is not a file")
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
                refuse_lfs_pointer(path)
                raise _damaged(path, "the header's length is out of range")
            raw = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        table = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _damaged(path, "the header is not JSON") from None
    if not isinstance(table, dict):
        raise _damaged(path, "the header is not an object")
    table.pop("__metadata__", None)
    start = 8 + length
    entries = [_entry(path, name, value, start) for name, value in table.items()]
    _check_layout(path, entries, start, file_bytes)
    return Header(path, {entry.name: entry for entry in entries}, raw, file_bytes)


def read_into(file: BufferedReader, entry: TensorEntry, target: torch.Tensor) -> None:
    """Fill ``target``, a contiguous tensor with the entry's shape, casting to its dtype.

    Raises:
        ModelLoadError: the file has become shorter than its header says.
    """
    flat = target.view(-1)
    file.seek(entry.begin)
    if flat.device.type == "cpu" and flat.dtype == entry.dtype:
        _read_exactly(file, entry, flat.view(torch.uint8).numpy().data)
        return
    done = 0
    for piece in _pieces(file, entry):
        flat[done : done + piece.numel()].copy_(piece)
        done += piece.numel()


def read_tensor(file: BufferedReader, entry: TensorEntry) -> torch.Tensor:
    """Read a tensor unchanged, on the CPU, in pages of its own. Raises as ``read_into``."""
    tensor = mapped_zeros(entry.shape, entry.dtype)
    read_into(file, entry, tensor)
    return tensor


def are_equal(first: tuple[Header, TensorEntry], second: tuple[Header, TensorEntry]) -> bool:
    """Return whether two tensors have the same shape and numbers. Raises as ``read_into``."""
    entries = [entry for _, entry in (first, second)]
    if entries[0].shape != entries[1].shape or entries[0].dtype != entries[1].dtype:
        return False
    with first[0].path.open("rb") as one, second[0].path.open("rb") as other:
        one.seek(entries[0].begin)
        other.seek(entries[1].begin)
        pairs = zip(_pieces(one, entries[0]), _pieces(other, entries[1]), strict=True)
        return all(_are_same(left, right) for left, right in pairs)


def _pieces(file: BufferedReader, entry: TensorEntry) -> Iterator[torch.Tensor]:
    """Yield the tensor's values in file order, some MiB at a time, all in the same buffer."""
    # In pages of its own: among long-lived tensors it would fragment the heap.
    staging = mapped_zeros((min(_STAGING_BYTES, entry.num_bytes),), torch.uint8)
    view = staging.numpy().data
    left = entry.num_bytes
    while left:
        size = min(left, len(view))
        _read_exactly(file, entry, view[:size])
        yield staging[:size].view(entry.dtype)
        left -= size


def _are_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two vectors have the same bits or numbers. Eight bytes are compared at a time: that
    takes a fifth of the time of comparing 16-bit numbers."""
    bits = torch.uint8 if left.nbytes % 8 else torch.int64
    return torch.equal(left.view(bits), right.view(bits)) or torch.equal(left, right)


def _read_exactly(file: BufferedReader, entry: TensorEntry, into: memoryview) -> None:
    if file.readinto(into) != len(into):
        raise ModelLoadError(f"{file.name}: '{entry.name}' is cut short")


def _entry(path: Path, name: str, value: Any, start: int) -> TensorEntry:
    """Make one entry of the table, checking its types, shape and size."""
    shown = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{shown} is not described by dtype, shape and data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise _damaged(path, f"{shown} has dtype {value['dtype']!r:.40}, which is not supported")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise _damaged(path, f"{shown} has a malformed shape")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"{shown} has malformed offsets")
    num_bytes = offsets[1] - offsets[0]
    if math.prod(shape) * dtype.itemsize != num_bytes:
        raise _damaged(path, f"{shown} has {num_bytes} bytes for shape {shape}"[:160])
    return TensorEntry(name, dtype, tuple(shape), start + offsets[0], num_bytes)


def _check_layout(path: Path, entries: list[TensorEntry], start: int, file_bytes: int) -> None:
    """Check that the tensors cover the file to its end without gaps or overlaps."""
    end = start
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.num_bytes)):
        if entry.begin != end:
            word = "overlaps another" if entry.begin < end else "leaves a gap before it"
            raise _damaged(path, f"tensor {entry.name[:80]!r} {word}")
        end += entry.num_bytes
    if end > file_bytes:
        raise _damaged(path, f"cut short: {file_bytes} bytes of {end}")
    if end < file_bytes:
        raise _damaged(path, f"has {file_bytes - end} bytes after its last tensor")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _damaged(path: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {problem}")
