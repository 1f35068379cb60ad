"""A GPU's tensors on the host, while their memory there belongs to others.

A tensor is a view of a storage, and a storage can be emptied and filled again without its views
noticing. So what holds weights need not know: layers keep their tensors, which are not to be read
until the storages are back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Self

import torch


class HostCopy:
    """The contents of storages that are empty meanwhile.

    Args:
        storages: whose memory is given up; each once.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages:
            # One after the other: what is copied is freed before the next is.
            copy = torch.UntypedStorage(storage.nbytes())
            copy.copy_(storage)
            self._copies.append((storage, copy))
            storage.resize_(0)

    @classmethod
    def of(cls, root: object, device: torch.device) -> Self:
        """Of all tensors on ``device`` that ``root`` refers to."""
        return cls(dict(_storages(root, device)).values())

    @property
    def num_bytes(self) -> int:
        """What the copies take."""
        return sum(copy.nbytes() for _, copy in self._copies)

    def bring_back(self) -> None:
        """Fill the storages again, in memory taken anew; to be called once.

        Raises:
            RuntimeError: the device has no room; what is there already stays, and the rest can be
                brought later.
        """
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._copies.pop()


def _storages(root: object, device: torch.device) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Storages on ``device`` below ``root``, by their address; some more than once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            if storage.device.type == device.type and storage.nbytes():
                yield storage.data_ptr(), storage
        else:
            stack += _parts(thing)


def _parts(thing: object) -> Iterable[object]:
    """What a thing refers to, as far as models are made of it."""
    if isinstance(thing, (str, bytes, type, ModuleType)):
        return ()
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, (tuple, list, set, frozenset)):
        return thing
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    parts = [getattr(thing, "__self__", None)]  # of a method
    closure = getattr(thing, "__closure__", None) or ()
    parts += [cell.cell_contents for cell in closure]
    parts += vars(thing).values() if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(thing, name):
                parts.append(getattr(thing, name))
    return parts
