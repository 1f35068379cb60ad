"""Host copies of a GPU's tensors whose device memory has been freed.

A tensor is a view of a storage, and a storage can be emptied and refilled without its views
noticing. The objects that hold weights are therefore unaffected: layers keep their tensors, which
must not be read until the storages are filled again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Self

import torch


class HostCopy:
    """The contents of storages whose device memory is freed.

    Args:
        storages: those to free; each once.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages:
            # One at a time: each storage is freed before the next is copied.
            copy = torch.UntypedStorage(storage.nbytes())
            copy.copy_(storage)
            self._copies.append((storage, copy))
            storage.resize_(0)

    @classmethod
    def of(cls, root: object, device: torch.device) -> Self:
        """Copy and free all tensors on ``device`` that are reachable from ``root``."""
        return cls(dict(_storages(root, device)).values())

    @property
    def num_bytes(self) -> int:
        """The size of the copies."""
        return sum(copy.nbytes() for _, copy in self._copies)

    def restore(self) -> None:
        """Allocate the storages again and fill them; call once.

        Raises:
            RuntimeError: the device is out of memory. What has been copied stays; a later call
                copies the rest.
        """
        while self._copies:
            storage, copy = self._copies[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._copies.pop()


def _storages(root: object, device: torch.device) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Yield storages on ``device`` reachable from ``root``, with addresses; some repeatedly."""
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
    """Return the objects a thing refers to, for the types that models are made of."""
    if isinstance(thing, (str, bytes, type, ModuleType)):
        return ()
    if isinstance(thing, Mapping):
        return thing.values()
    if isinstance(thing, (tuple, list, set, frozenset)):
        return thing
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    parts = [getattr(thing, "__self__", None)]  # of a bound method
    closure = getattr(thing, "__closure__", None) or ()
    parts += [cell.cell_contents for cell in closure]
    parts += vars(thing).values() if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(thing, name):
                parts.append(getattr(thing, name))
    return parts
