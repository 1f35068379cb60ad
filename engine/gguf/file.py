"""Read the tables of GGUF files without trusting their contents. Standard library only.

    "GGUF", version ── counts ── metadata: typed keys and values ── table of tensors ── their bytes

The format is described in ggml's ``docs/gguf.md``. This replaces the reader of the ``gguf``
package, which makes an array object for each token and merge: 22 s and 490 MB for a vocabulary of
150,000, and arbitrary numpy errors for damaged files. Tests check that both return the same.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError
from engine.lfs_pointer import refuse_lfs_pointer

MAX_HEADER_BYTES = 512 * 2**20
_MAX_TENSORS = 2**20
_MAX_KEYS = 2**16
_MAX_DIMS = 4  # ggml's limit
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_CHUNK_BYTES = 4 * 2**20
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SPLITS = 1024

# Number of a value type -> its code in ``struct``.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a tensor's numbers are stored: blocks of ``block`` weights in ``num_bytes``."""

    name: str
    block: int
    num_bytes: int


# ggml's numbering. Integer types hold no weights; types that ggml has dropped are missing.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; ``shape`` begins with the slowest dimension, as in torch."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    path: Path
    begin: int  # from the start of the file, in bytes
    num_bytes: int


class MetadataArray:
    """A metadata array, decoded on access."""

    __slots__ = ("_begin", "_buffer", "_kind", "_length")

    def __init__(self, buffer: bytearray, kind: int, length: int, begin: int) -> None:
        self._buffer, self._kind, self._length, self._begin = buffer, kind, length, begin

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"a list of {self._length}"

    @property
    def is_text(self) -> bool:
        """Whether it holds strings."""
        return self._kind == _STRING

    def values(self) -> list[Any]:
        """Return the numbers or strings. Raises UnicodeDecodeError if a string is not UTF-8."""
        if self._kind != _STRING:
            code = f"<{self._length}{_SCALARS[self._kind]}"
            return list(struct.unpack_from(code, self._buffer, self._begin))
        found, at, buffer = [], self._begin, self._buffer
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(self._length):
            (length,) = read_length(buffer, at)
            at += 8 + length
            found.append(buffer[at - length : at].decode())
        return found


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The tables of a model's file, or of all files that it is split into."""

    path: Path  # of the first file
    metadata: Mapping[str, Any]  # scalars, str and Array
    tensors: Mapping[str, GgufTensor]
    raw: bytes  # tables and file sizes, for the fingerprint

    @property
    def architecture(self) -> str:
        """The file's name of its family."""
        return self.text("general.architecture", "")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string. Raises ModelLoadError if it is missing or of another type."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be a string" if key in self.metadata else "is missing")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.metadata.get(key, default)
        if type(value) is not bool:
            raise self.error(key, f"must be true or false, not {value!r:.80}")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; empty if it is missing."""
        return self._array(key, is_text=True)

    def numbers(self, key: str) -> list[Any]:
        """Return a list of numbers; empty if it is missing."""
        return self._array(key, is_text=False)

    def error(self, key: str, problem: str) -> ModelLoadError:
        """Make the one-line error about a key."""
        return ModelLoadError(f"{self.path}: {key[:80]!r} {problem}")

    def _array(self, key: str, *, is_text: bool) -> list[Any]:
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, MetadataArray) or (len(value) and value.is_text != is_text):
            raise self.error(key, f"must be a list of {'strings' if is_text else 'numbers'}")
        try:
            return value.values()
        except UnicodeDecodeError:
            raise self.error(key, "holds text that is not UTF-8") from None


def is_gguf(model: str | Path) -> bool:
    """Return whether ``model`` is an existing file in this format; some have no suffix."""
    path = Path(model)
    try:
        if not path.is_file():  # opening a pipe would block
            return False
        with path.open("rb") as file:
            return path.suffix == ".gguf" or file.read(4) == _MAGIC
    except OSError:
        return path.suffix == ".gguf"  # reading it reports the error


def find_gguf(model: str | Path) -> Path | None:
    """Return the GGUF file that ``model`` names or that is in the directory; None for other models.

    A directory with a ``config.json`` is in Hugging Face format, whatever else it contains.

    Raises:
        ModelLoadError: the directory holds several models.
    """
    path = Path(model)
    if is_gguf(path):
        return _first_split(path)
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted({_first_split(file) for file in path.glob("*.gguf")})
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise ModelLoadError(f"{path}: holds {len(found)} GGUF models ({names}); name one of them")
    return found[0] if found else None


def read_gguf(path: Path) -> GgufFile:
    """Read and check the tables of a model, from all files if it is split.

    Raises:
        ModelLoadError: a file cannot be read, is truncated or has impossible contents; one line
            that names the file.
    """
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if count == 1:
        return first
    named = _SPLIT_NAME.fullmatch(path.name)
    if named is None or type(count) is not int or not 1 < count <= _MAX_SPLITS:
        raise ModelLoadError(
            f"{path}: is one of {count!r:.20} files and is not named as such (-00001-of-00002.gguf)"
        )
    if int(named[3]) != count:
        raise ModelLoadError(f"{path}: is one of {count} files, by its name of {int(named[3])}")
    tensors, raw = dict(first.tensors), first.raw
    for number in range(2, count + 1):
        part = _read_one(path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf"))
        if part.metadata.get("split.no") != number - 1 or part.metadata.get("split.count") != count:
            raise ModelLoadError(f"{part.path}: does not say that it is file {number} of {count}")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelLoadError(f"{part.path}: tensor {name[:80]!r} appears twice")
            tensors[name] = tensor
        raw += part.raw
    declared_count = first.metadata.get("split.tensors.count", len(tensors))
    if declared_count != len(tensors):
        raise ModelLoadError(
            f"{path}: names {declared_count!r:.20} tensors, its files hold {len(tensors)}"
        )
    return GgufFile(path, first.metadata, tensors, raw)


class _Header:
    """The beginning of a file, read incrementally."""

    def __init__(self, file: BufferedReader, path: Path, file_bytes: int) -> None:
        self.path, self.file_bytes = path, file_bytes
        self.buffer = bytearray()
        self.offset = 0
        self._file = file

    def consume(self, size: int) -> int:
        """Buffer ``size`` more bytes and consume them; return their offset."""
        begin, end = self.offset, self.offset + size
        if end > min(self.file_bytes, MAX_HEADER_BYTES):
            word = "cut short" if end > self.file_bytes else "its tables are too large"
            raise self.error(word)
        if end > len(self.buffer):
            self.buffer += self._file.read(max(end - len(self.buffer), _CHUNK_BYTES))
            if end > len(self.buffer):
                raise self.error("cut short")
        self.offset = end
        return begin

    def number(self, code: str) -> Any:
        """Read a number by its code in ``struct``."""
        begin = self.consume(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.buffer, begin)[0]

    def text(self, what: str) -> str:
        """Read a string. Raises ModelLoadError if it is not UTF-8."""
        length = self.number("Q")
        begin = self.consume(length)
        try:
            return self.buffer[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def skip_texts(self, count: int) -> None:
        """Skip ``count`` strings: there are hundreds of thousands of tokens and merges."""
        read_length = struct.Struct("<Q").unpack_from
        buffer, at, left = self.buffer, self.offset, count
        while left:
            known = len(buffer)
            while left and at + 8 <= known:
                behind = at + 8 + read_length(buffer, at)[0]
                if behind > known:
                    break
                at, left = behind, left - 1
            self.offset = at
            if left:  # the next one is not buffered
                self.consume(self.number("Q"))
                at, left = self.offset, left - 1

    def count(self, what: str, limit: int) -> int:
        """Read a number of items. Each takes bytes, so the file's size bounds it too."""
        value = self.number("Q")
        if value > min(limit, self.file_bytes):
            raise self.error(f"{what} is out of range: {value}")
        return value

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {problem}")


def _read_one(path: Path) -> GgufFile:
    try:
        # Non-blocking, because opening a pipe would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            file_status = os.fstat(descriptor)
            if not stat.S_ISREG(file_status.st_mode):
                raise ModelLoadError(f"{path}: is not a file")
            return _read_tables(_Header(file, path, file_status.st_size))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None


def _read_tables(header: _Header) -> GgufFile:
    if header.file_bytes < 24 or header.buffer[header.consume(4) : 4] != _MAGIC:
        refuse_lfs_pointer(header.path)
        raise header.error("is not a GGUF file")
    version = header.number("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        problem = "is of a big-endian machine" if swapped in _VERSIONS else f"has version {version}"
        raise header.error(f"{problem}; only little-endian GGUF versions 2 and 3 are supported")
    num_tensors = header.count("the number of tensors", _MAX_TENSORS)
    num_keys = header.count("the number of keys", _MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = header.text("a key")
        if key in metadata:
            raise header.error(f"key {key[:80]!r} appears twice")
        metadata[key] = _value(header, key)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise header.error(f"'general.alignment' must be a power of two, not {alignment!r:.40}")
    entries = [_entry(header) for _ in range(num_tensors)]
    start = _aligned(header.offset, alignment)
    tensors = {tensor.name: tensor for tensor in _placed(header, entries, start, alignment)}
    if len(tensors) < num_tensors:
        raise header.error("a tensor appears twice")
    raw = bytes(header.buffer[: header.offset]) + header.file_bytes.to_bytes(8, "little")
    return GgufFile(header.path, metadata, tensors, raw)


def _value(header: _Header, key: str) -> Any:
    kind = header.number("I")
    if kind in _SCALARS:
        return header.number(_SCALARS[kind])
    if kind == _STRING:
        return header.text(f"{key[:80]!r}")
    if kind != _ARRAY:
        raise header.error(f"{key[:80]!r} has a value of unknown type {kind}")
    kind = header.number("I")
    length = header.count(f"the length of {key[:80]!r}", header.file_bytes)
    begin = header.offset
    if kind == _STRING:
        header.skip_texts(length)
    elif kind in _SCALARS:
        begin = header.consume(length * struct.calcsize("<" + _SCALARS[kind]))
    else:
        raise header.error(f"{key[:80]!r} is a list of values of type {kind}; none are known")
    return MetadataArray(header.buffer, kind, length, begin)


_Entry = tuple[str, tuple[int, ...], TensorType, int]  # name, shape, type, offset


def _entry(header: _Header) -> _Entry:
    name = header.text("a tensor's name")
    shown = f"tensor {name[:80]!r}"
    num_dims = header.number("I")
    if num_dims > _MAX_DIMS:
        raise header.error(f"{shown} has {num_dims} dimensions")
    shape = tuple(header.number("Q") for _ in range(num_dims))[::-1]  # the fastest comes first
    number = header.number("I")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise header.error(f"{shown} has type {number}, which is not supported")
    if any(size >= 2**63 for size in shape) or (shape and shape[-1] % kind.block):
        raise header.error(f"{shown} has shape {list(shape)}, which {kind.name} cannot have"[:200])
    return name, shape, kind, header.number("Q")


def _placed(
    header: _Header, entries: list[_Entry], start: int, alignment: int
) -> Iterator[GgufTensor]:
    """Yield the tensors, checking that they are consecutive, aligned and within the file."""
    end = start
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        begin = start + offset
        num_bytes = math.prod(shape) // kind.block * kind.num_bytes
        if begin != _aligned(end, alignment):
            word = "overlaps another" if begin < end else "leaves a gap before it"
            raise header.error(f"tensor {name[:80]!r} {word}")
        end = begin + num_bytes
        if end > header.file_bytes:
            raise header.error(f"cut short: {header.file_bytes} bytes of {end} or more")
        yield GgufTensor(name, kind, shape, header.path, begin, num_bytes)


def _first_split(path: Path) -> Path:
    """Return the file with the metadata, given any file of a split model."""
    named = _SPLIT_NAME.fullmatch(path.name)
    return path if named is None else path.with_name(f"{named[1]}-00001-of-{named[3]}.gguf")


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
