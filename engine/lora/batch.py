"""Which tokens of a step have which adapter, and what is added to a layer's results for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.lora.store import AdapterStore
from engine.models.adapters import Change
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from kernels.lora import AdapterRows, adapter_rows
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


def step_adapters(
    store: AdapterStore, batch: HostBatch, table: RowTable, operations: Operations
) -> tuple[StepAdapters, StepAdapters] | None:
    """The adapters of all tokens, and of the sampling rows' last ones; None where no row has any.

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
    rows = np.array([-1 if a is None else slots[a.id] for a in of_rows], np.int64)
    device = table.tables.device
    tokens = np.repeat(rows, np.diff(batch.query_start))
    return (
        StepAdapters(store, adapter_rows(tokens, store.num_slots, device), operations),
        StepAdapters(
            store, adapter_rows(rows[batch.sampling_rows], store.num_slots, device), operations
        ),
    )
