"""Read the tables of PyTorch's own checkpoints (``pytorch_model.bin``): which tensors are where.

Such a file is an archive with a pickle in it. The pickle is read by torch's restricted unpickler,
which makes only tensors, on the device "meta", which has no memory. This yields shapes and offsets,
and the numbers are then read like those of a safetensors file. Such unpicklers have had
vulnerabilities, so these files are read only on request.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

import torch

from engine.errors import ModelLoadError
from engine.models.safetensors import Header, TensorEntry

_MAX_PICKLE_BYTES = 8 * 2**20  # a table of 1,000 tensors takes about 150 kB
_MAX_NESTING = 100  # of tuples; real tables nest about three


def read_torch_header(path: Path) -> Header:
    """Read the table of a file written by ``torch.save`` in its current format, a zip archive.

    Raises:
        ModelLoadError: the file cannot be read, holds anything besides tensors, or holds a tensor
            that is not contiguous in it; one line that names the file.
    """
    try:
        if not path.is_file():
            raise ModelLoadError(f"{path}: is not a file")
        file_bytes = path.stat().st_size
        _check_archive(path)
        table = torch.load(path, map_location="meta", weights_only=True)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception:  # a damaged or hostile pickle may raise anything
        raise ModelLoadError(
            f"{path}: is damaged, or holds more than tensors, which is not read"
        ) from None
    if not isinstance(table, dict) or not table:
        raise ModelLoadError(f"{path}: does not hold tensors by name")
    entries = [_entry(path, name, value, file_bytes) for name, value in table.items()]
    listing = "\n".join(f"{entry.name} {entry.dtype} {entry.shape}" for entry in entries)
    return Header(path, {entry.name: entry for entry in entries}, listing.encode(), file_bytes)


def _check_archive(path: Path) -> None:
    """Raise ModelLoadError if it is not a current archive, or would grow in memory."""
    if not zipfile.is_zipfile(path):
        raise ModelLoadError(
            f"{path}: is not in PyTorch's format of 2020 and later; load it with torch and "
            "save it as safetensors"
        )
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    # torch does not compress, so numbers can be read in place.
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ModelLoadError(f"{path}: is compressed, as torch saves nothing")
    pickles = [member.file_size for member in members if member.filename.endswith(".pkl")]
    if sum(pickles) > _MAX_PICKLE_BYTES:
        raise ModelLoadError(f"{path}: its table takes {sum(pickles) / 1e6:,.0f} MB")
    with zipfile.ZipFile(path) as archive:
        for member in members:
            if member.filename.endswith(".pkl") and _is_too_deep(archive.read(member)):
                raise ModelLoadError(
                    f"{path}: its table has more than {_MAX_NESTING} nested tuples"
                )


def _is_too_deep(pickle: bytes) -> bool:
    """Return whether tuples nest so deep that hashing one as a key would overflow the stack.

    The interpreter hashes nested tuples by unbounded recursion. The pickle is not executed here.
    """
    stack: list[int] = []  # tuple nesting of each value; -1: a mark
    memo: dict[int, int] = {}
    for opcode, argument, _ in pickletools.genops(pickle):
        name = opcode.name
        if name == "MARK":
            stack.append(-1)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif "PUT" in name:
            memo[int(argument or 0)] = stack[-1]
        elif "GET" in name:
            stack.append(memo[int(argument or 0)])
        else:
            depth = 0
            num_taken = len(opcode.stack_before)
            if pickletools.stackslice in opcode.stack_before:
                while (taken := stack.pop()) >= 0:
                    depth = max(depth, taken)
                num_taken -= 2  # the mark and the value on it
            for _ in range(num_taken):
                depth = max(depth, stack.pop())
            depth += name.startswith("TUPLE")
            if depth > _MAX_NESTING:
                return True
            stack.extend([depth] * len(opcode.stack_after))
    return False


def _entry(path: Path, name: object, value: object, file_bytes: int) -> TensorEntry:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        shown = (
            f"{name[:80]!r}" if isinstance(name, str) else f"a key of type {type(name).__name__}"
        )
        raise ModelLoadError(f"{path}: {shown} is not a tensor by name")
    begin = value.untyped_storage()._checkpoint_offset
    num_bytes = value.numel() * value.element_size()
    if begin is None or not value.is_contiguous():
        raise ModelLoadError(f"{path}: tensor {name[:80]!r} does not lie in one piece")
    begin += int(value.storage_offset()) * value.element_size()
    if not 0 <= begin <= begin + num_bytes <= file_bytes:
        raise ModelLoadError(f"{path}: tensor {name[:80]!r} lies outside the file")
    return TensorEntry(name, value.dtype, tuple(value.shape), begin, num_bytes)
