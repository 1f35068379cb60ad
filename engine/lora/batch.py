"""Which tokens of a step have which adapter, and what is added to a layer's results for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.lora.store import AdapterStore
from engine.models.adapters import Change
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from kernels.cpu.program import NotRecordableError
from kernels.lora import AdapterRows, adapter_rows, by_slot
from kernels.operations import Operations


class StepAdapters:
    """The adapters of one step.

    Args:
        store: holds them all in slots.
        rows: the adapters' slots by token.
        operations: compute.
    """

    __slots__ = ("_operations", "_rows", "_store")

    def __init__(self, store: AdapterStore, rows: AdapterRows, operations: Operations) -> None:
        self._store = store
        self._rows = rows
        self._operations = operations

    def add(self, out: torch.Tensor, x: torch.Tensor, parameter: str) -> torch.Tensor:
        """``out`` with each token's own delta of a layer added, in place.

        Args:
            out: [n, outputs], what the layer gave.
            x: [n, inputs], what it read.
            parameter: the layer's weight.
        """
        weights = self._store.layer(parameter)
        if weights is None:
            return out
        return self._operations.add_adapters(out, x.contiguous(), weights, self._rows)

    def changes(self, parameter: str) -> Iterator[Change]:
        """What each adapter adds to a parameter, ranks that it does not use as zeros."""
        weights = self._store.layer(parameter)
        if weights is None:
            return
        for slot, begin, end in self._rows.groups.tolist():
            yield Change(self._rows.order[begin:end], weights.down[slot], weights.up[slot])


class RecordedAdapters(StepAdapters):
    """The adapters of a decode step that is recorded once and run for whichever its rows have.

    Args:
        store: as it is while its ``version`` stays.
        size: rows of the step.
        operations: compute.
    """

    __slots__ = ()

    def __init__(self, store: AdapterStore, size: int, operations: Operations) -> None:
        rows = adapter_rows(np.full(size, -1), store.num_slots, torch.device("cpu"))
        rows = rows._replace(
            order=torch.zeros(size, dtype=torch.int64), groups=np.zeros((size, 3), np.int64)
        )
        super().__init__(store, rows, operations)

    def set(self, slots: np.ndarray) -> None:
        """Whose step is run next: the slot of each row's adapter, [size] int64, -1 for none."""
        order, groups = by_slot(slots)
        self._rows.order.numpy()[: order.size] = order
        self._rows.groups[: len(groups)] = groups
        self._rows.groups[len(groups) :] = 0  # groups of no token

    def changes(self, parameter: str) -> Iterator[Change]:
        """Which products there are depends on the rows, so this cannot be recorded."""
        if self._store.layer(parameter) is not None:
            raise NotRecordableError(f"an adapter's part in {parameter.partition('.')[2]}")
        return iter(())


def adapter_slots(store: AdapterStore, batch: HostBatch, table: RowTable) -> np.ndarray | None:
    """The store's slot of each row's adapter, [R] int64, -1 for none; None where no row has any.

    Raises:
        InvalidParameter: an adapter can no longer be read.
    """
    if store.is_empty:
        return None
    of_rows = [table.requests[slot].adapter for slot in batch.slots.tolist()]
    adapters = [adapter for adapter in of_rows if adapter is not None]
    if not adapters:
        return None
    slots = store.slots(adapters)
    return np.array([-1 if a is None else slots[a.id] for a in of_rows], np.int64)


def step_adapters(
    store: AdapterStore, slots: np.ndarray, batch: HostBatch, operations: Operations
) -> tuple[StepAdapters, StepAdapters]:
    """The adapters of all tokens, and of the sampling rows' last ones.

    Args:
        store: holds them.
        slots: of the rows' adapters, as ``adapter_slots`` tells them.
        batch: the rows.
        operations: compute.
    """
    tokens = np.repeat(slots, np.diff(batch.query_start))
    return (
        StepAdapters(store, adapter_rows(tokens, store.num_slots, store.device), operations),
        StepAdapters(
            store,
            adapter_rows(slots[batch.sampling_rows], store.num_slots, store.device),
            operations,
        ),
    )
