"""Maps a step's tokens to their adapters, and adds the adapters' contributions to layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from engine.lora.store import AdapterStore
from engine.models.adapters import LoraDelta
from engine.models.step_state import StepState
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from kernels.cpu.program import NotRecordableError
from kernels.lora import AdapterRows, adapter_rows, group_by_slot
from kernels.operations import Operations


class StepAdapters:
    """The adapters of one step.

    Args:
        store: holds all adapters in slots.
        rows: the slot of each token's adapter.
        operations: the kernels.
    """

    __slots__ = ("_operations", "_rows", "_store")

    def __init__(self, store: AdapterStore, rows: AdapterRows, operations: Operations) -> None:
        self._store = store
        self._rows = operations.plan_adapters(rows, store.num_slots)
        self._operations = operations

    def add(self, out: torch.Tensor, x: torch.Tensor, parameter: str) -> torch.Tensor:
        """Add each token's adapter contribution to ``out``, in place.

        Args:
            out: [n, outputs], the layer's result.
            x: [n, inputs], the layer's input.
            parameter: the layer's weight.
        """
        weights = self._store.layer(parameter)
        if weights is None:
            return out
        return self._operations.add_adapters(out, x.contiguous(), weights, self._rows)

    def deltas(self, parameter: str) -> Iterator[LoraDelta]:
        """Each adapter's change of a parameter; ranks that it does not use are zeros."""
        weights = self._store.layer(parameter)
        if weights is None:
            return
        for slot, begin, end in self._rows.groups.tolist():
            yield LoraDelta(self._rows.order[begin:end], weights.down[slot], weights.up[slot])


class RecordedAdapters(StepAdapters):
    """The adapters of a decode step that is recorded once and run with any adapters.

    Args:
        store: must not change its ``version`` in between.
        size: rows of the step.
        operations: the kernels.
    """

    __slots__ = ()

    def __init__(self, store: AdapterStore, size: int, operations: Operations) -> None:
        rows = adapter_rows(np.full(size, -1), store.num_slots, torch.device("cpu"))
        rows = rows._replace(
            order=torch.zeros(size, dtype=torch.int64), groups=np.zeros((size, 3), np.int64)
        )
        super().__init__(store, rows, operations)

    def set(self, slots: np.ndarray) -> None:
        """Set the adapter slots of the next run's rows: [size] int64, -1 for none."""
        order, groups = group_by_slot(slots)
        self._rows.order.numpy()[: order.size] = order
        self._rows.groups[: len(groups)] = groups
        self._rows.groups[len(groups) :] = 0  # empty groups

    def deltas(self, parameter: str) -> Iterator[LoraDelta]:
        """Raise NotRecordableError, since the products depend on the rows."""
        return _refuse_deltas(self._store, parameter)


class CapturedAdapters:
    """The adapters of a step that is captured once and replayed with any adapters.

    Args:
        store: must not change its ``version`` in between.
        num_rows: rows of the step.
        num_tokens: its tokens; None: one for each row.
        operations: the kernels.
        uploads: to the store's device.
    """

    def __init__(
        self,
        store: AdapterStore,
        num_rows: int,
        num_tokens: int | None,
        operations: Operations,
        uploads: Uploads,
    ) -> None:
        if store.has_absorbed:  # before other ranks are asked to capture
            raise NotRecordableError("an adapter's part in latent_up")
        self._store = store
        self._operations = operations
        self._uploads = uploads
        self._of_rows = self._without_any(num_rows)
        self._of_tokens = None if num_tokens is None else self._without_any(num_tokens)

    def set(self, slots: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Set the adapter slots of the next replay's rows: [n] int64, -1 for none; others have
        none. ``lengths`` are the tokens of each; None: one."""
        self._fill(self._of_rows, slots)
        if self._of_tokens is not None:
            assert lengths is not None
            self._fill(self._of_tokens, np.repeat(slots, lengths))

    def applied(self, state: StepState) -> StepState:
        """Add the adapters to the state of a step that is being captured, in which the last tokens
        of all rows are sampled from."""
        of_rows = self._of_step(self._of_rows)
        of_tokens = of_rows if self._of_tokens is None else self._of_step(self._of_tokens)
        return replace(state, adapters=of_tokens, output_adapters=of_rows)

    def _without_any(self, count: int) -> torch.Tensor:
        return torch.full((count,), -1, dtype=torch.int32, device=self._store.device)

    def _fill(self, target: torch.Tensor, slots: np.ndarray) -> None:
        given = np.full(target.shape[0], -1, np.int32)
        given[: slots.size] = slots
        self._uploads.fill(target, [given])

    def _of_step(self, slots: torch.Tensor) -> StepAdapters:
        nothing = slots[:0]
        rows = AdapterRows(slots.long(), nothing, nothing, np.empty((0, 3), np.int64))
        return _CapturedStepAdapters(self._store, rows, self._operations)


class _CapturedStepAdapters(StepAdapters):
    __slots__ = ()

    def deltas(self, parameter: str) -> Iterator[LoraDelta]:
        """See ``RecordedAdapters.deltas``."""
        return _refuse_deltas(self._store, parameter)


def _refuse_deltas(store: AdapterStore, parameter: str) -> Iterator[LoraDelta]:
    if store.layer(parameter) is not None:
        raise NotRecordableError(f"an adapter's part in {parameter.partition('.')[2]}")
    return iter(())


def adapter_slots(store: AdapterStore, batch: HostBatch, table: RowTable) -> np.ndarray | None:
    """The store's slot of each row's adapter, [R] int64, -1 for none; None if no row has one.

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
    """The adapters of all tokens, and those of the tokens that are sampled from.

    Args:
        store: holds the adapters.
        slots: of the rows' adapters, from ``adapter_slots``.
        batch: the rows.
        operations: the kernels.
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
