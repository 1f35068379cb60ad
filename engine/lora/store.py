"""Stores loaded adapters: all on the host, those in use in slots on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.nn import functional

from engine.errors import InvalidParameter
from engine.lora.files import adapter_digest
from engine.lora.peft import Delta, read_adapter
from engine.models.spec import DecoderSpec
from engine.types import Adapter
from kernels.lora import AdapterWeights, nonzero_spans
from kernels.transfer import to_device

_RANK_MULTIPLE = 16


class AdapterStore:
    """Adapters by id; the least recently used are evicted first, on the device and on the host.

    The adapters of one layer are in one tensor with a slot for each, as grouped products read them.
    Slots are allocated when needed, on a GPU all ``max_loaded`` at once, and more if the rows of
    one step need more. Without adapters nothing is allocated.

    Args:
        spec: of the model.
        dtype, device: of its weights.
        max_loaded: slots on the device, unless one step needs more; 0: adapters are refused.
        max_on_host: adapters kept on the host.
        select_shard: selects this process's part of an adapter's change to a parameter, or None if
            it has no part; default: everything.
        checks_files: refuse files that are not those that were registered. Of several ranks one
            does, as all read at the same times.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_loaded: int,
        max_on_host: int,
        select_shard: Callable[[str, Delta], Delta | None] | None = None,
        checks_files: bool = True,
    ) -> None:
        self._select_shard = select_shard
        self._checks_files = checks_files
        self._spec = spec
        self._dtype = dtype
        self.device = device  # of the slots
        # A GPU's kernels are compiled for the number of slots, and for whether ranks are multiples
        # of 16. One more or one larger adapter should not require another compilation.
        self._has_static_shapes = device.type == "cuda"
        self._max_loaded = max_loaded
        self._max_on_host = max(max_loaded, max_on_host)
        self._on_host: OrderedDict[str, dict[str, Delta]] = OrderedDict()  # oldest use first
        self._slots: OrderedDict[str, int] = OrderedDict()  # in the same order
        self.num_slots = 0  # on the device
        self.version = 0  # incremented when tensors of ``layer`` are replaced
        self._layers: dict[str, AdapterWeights] = {}  # by parameter

    @property
    def is_empty(self) -> bool:
        """Whether no adapter was ever loaded."""
        return not self._on_host

    @property
    def has_absorbed(self) -> bool:
        """Whether an adapter on the device changes what latent attention absorbs."""
        return any(name.endswith(".latent_up") for name in self._layers)

    def load(self, adapter: Adapter) -> None:
        """Read an adapter onto the host, if it is not there already.

        Raises:
            InvalidParameter: it cannot be used with this model, or is not the one that was
                registered any more.
        """
        if not self._max_loaded:
            message = "adapters are off here: --max-loras is 0, or they are not batch-invariant"
            raise InvalidParameter(message, param="model")
        if adapter.id in self._on_host:
            self._on_host.move_to_end(adapter.id)
            return
        deltas = read_adapter(Path(adapter.path), self._spec, self._dtype)
        # Texts begun with the former weights, and their cached prefixes, would go on with others.
        if self._checks_files and adapter.digest not in ("", adapter_digest(adapter.path)):
            message = "the adapter's files have changed since it was loaded; load it again"
            raise InvalidParameter(message, param="model")
        if not deltas:
            raise InvalidParameter("the adapter cannot be used: it is empty", param="model")
        if self._select_shard is not None:
            kept = ((name, self._select_shard(name, delta)) for name, delta in deltas.items())
            deltas = {name: delta for name, delta in kept if delta is not None}
        self._on_host[adapter.id] = deltas
        for id_ in list(self._on_host):
            if len(self._on_host) <= self._max_on_host:
                break
            if id_ not in self._slots and id_ != adapter.id:
                del self._on_host[id_]

    def slots(self, adapters: Iterable[Adapter]) -> dict[str, int]:
        """Bring all these adapters onto the device at once; returns their slots by id.

        Raises:
            InvalidParameter: an adapter had to be read again, and its files are no longer valid, or
                others.
        """
        wanted = {adapter.id: adapter for adapter in adapters}
        for id_ in wanted:
            if id_ in self._slots:
                self._slots.move_to_end(id_)
        for id_, adapter in wanted.items():
            if id_ not in self._slots:
                self.load(adapter)
                slot = self._free_slot(wanted)
                self._fill(slot, self._on_host[id_])
                self._slots[id_] = slot
        return {id_: self._slots[id_] for id_ in wanted}

    def layer(self, parameter: str) -> AdapterWeights | None:
        """The adapters' weights for a layer, or None if none of them changes it."""
        return self._layers.get(parameter)

    def _free_slot(self, wanted: dict[str, Adapter]) -> int:
        """A slot that no row of this step uses."""
        if len(self._slots) >= self._max_loaded:
            for id_ in self._slots:
                if id_ not in wanted:
                    return self._slots.pop(id_)
        used = set(self._slots.values())
        slot = next(nth for nth in range(len(used) + 1) if nth not in used)
        if slot >= self.num_slots:
            self._grow(max(slot + 1, self._max_loaded if self._has_static_shapes else 0))
        return slot

    def _grow(self, num_slots: int) -> None:
        """Enlarge all tensors to ``num_slots`` slots."""
        self.version += 1
        for name, weights in self._layers.items():
            more = num_slots - weights.down.shape[0]
            self._layers[name] = AdapterWeights(
                *(functional.pad(tensor, (0, 0, 0, 0, 0, more)) for tensor in weights)
            )
        self.num_slots = num_slots

    def _fill(self, slot: int, deltas: dict[str, Delta]) -> None:
        for name in deltas.keys() | self._layers.keys():
            delta = deltas.get(name)
            if delta is not None:
                self._widen(name, delta)
            weights = self._layers[name]
            for tensor in weights:
                tensor[slot] = 0
            if delta is not None:
                rank = delta.down.shape[0]
                weights.down[slot, :rank] = to_device(delta.down, self.device)
                weights.up[slot, :rank] = to_device(delta.up.T.contiguous(), self.device)
                weights.spans[slot, :rank] = nonzero_spans(delta.up.T)

    def _widen(self, name: str, delta: Delta) -> None:
        """Ensure that a layer has tensors wide enough for this delta's rank."""
        weights = self._layers.get(name)
        rank, have = delta.down.shape[0], 0 if weights is None else weights.down.shape[1]
        if have >= rank:
            return
        if self._has_static_shapes:
            rank = -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE
        wider = AdapterWeights(
            self._zeros(rank, delta.down.shape[1]),
            self._zeros(rank, delta.up.shape[0]),
            torch.zeros((self.num_slots, rank, 2), dtype=torch.int32),
        )
        if weights is not None:
            for tensor, held in zip(wider, weights, strict=True):
                tensor[:, :have] = held
        self._layers[name] = wider
        self.version += 1

    def _zeros(self, rank: int, size: int) -> torch.Tensor:
        shape = self.num_slots, rank, size
        return torch.zeros(shape, dtype=self._dtype, device=self.device)
